"""One good environment, and many wrong ones that differ from it by one planted bug each."""

import shutil
from pathlib import Path

from .bugs import BUGS, STEP_TIMEOUT_S, Bug

__all__ = ["BUGS", "STEP_TIMEOUT_S", "Bug", "bug", "build"]

HERE = Path(__file__).parent
GOOD = HERE / "good_env"


def bug(name: str) -> Bug:
    """Return the bug of that name."""
    (found,) = (one for one in BUGS if one.name == name)
    return found


def build(folder: Path, bug: Bug | None = None) -> Path:
    """Make the environment with a bug, or the good one, below a folder; return its own.

    It has a name of its own, so that several of them can be imported into one process.
    """
    name = "good_env" if bug is None else f"{bug.name}_env"
    made = folder / name
    shutil.copytree(GOOD, made, ignore=shutil.ignore_patterns("__pycache__"))
    for file, changes in (
        {} if bug is None else {"server/environment.py": bug.environment, **bug.files}
    ).items():
        text = (made / file).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, (name, file, old)
            text = text.replace(old, new)
        (made / file).write_text(text)
    for path in made.rglob("*"):
        if path.is_file() and "good_env" in (text := path.read_text()):
            path.write_text(text.replace("good_env", name))
    return made
