"""One good environment, and many wrong ones that differ from it by one planted bug each.

A bug is a file in `bugs/`: its docstring says what is wrong, `CAUGHT_BY` which check has to find it, `CHANGES` what
differs, as texts to replace in files of the good environment, `ALSO_SKIPPED` which checks then have nothing to look
at any more, and `STEP_TIMEOUT_S` how long a reply is waited for, where the bug is that none comes.
"""

import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
GOOD = HERE / "good_env"
STEP_TIMEOUT_S = 30.0
"""For a reply that comes: a check that runs out of it would be taken for one that caught a bug."""


@dataclass(frozen=True)
class Bug:
    name: str
    caught_by: str
    changes: Mapping[str, Mapping[str, str]]
    also_skipped: frozenset[str]
    step_timeout_s: float = STEP_TIMEOUT_S


def bugs() -> list[Bug]:
    """Return all of them."""
    return [_bug(file) for file in sorted((HERE / "bugs").glob("*.py"))]


def bug(name: str) -> Bug:
    """Return one of them."""
    return _bug(HERE / "bugs" / f"{name}.py")


def build(folder: Path, bug: Bug | None = None) -> Path:
    """Make the environment with a bug, or the good one, below a folder; return its own.

    It has a name of its own, so that several of them can be imported into one process.
    """
    name = "good_env" if bug is None else f"{bug.name}_env"
    made = folder / name
    shutil.copytree(GOOD, made, ignore=shutil.ignore_patterns("__pycache__"))
    for file, changes in ({} if bug is None else bug.changes).items():
        text = (made / file).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, (name, file, old)
            text = text.replace(old, new)
        (made / file).write_text(text)
    for path in made.rglob("*"):
        if path.is_file() and "good_env" in (text := path.read_text()):
            path.write_text(text.replace("good_env", name))
    return made


def _bug(file: Path) -> Bug:
    spec = importlib.util.spec_from_file_location(f"gallery_bug_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    assert found.__doc__
    return Bug(
        file.stem,
        found.CAUGHT_BY,
        found.CHANGES,
        frozenset(getattr(found, "ALSO_SKIPPED", ())),
        getattr(found, "STEP_TIMEOUT_S", STEP_TIMEOUT_S),
    )
