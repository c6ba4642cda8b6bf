"""A template's folder, under another name."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.scaffold.names import PLACE_HOLDER, EnvironmentNames

TEMPLATES: Final[Mapping[str, str]] = {
    "game": "a number to guess: rules in one file",
    "tools": "a question to answer by calling tools",
    "gymnasium": "one of Gymnasium's environments, by its id",
}
"""What there is, and what it is."""

_FOLDER: Final = Path(__file__).with_name("templates")
_LEFT_OUT: Final = ("__pycache__", ".pytest_cache", ".hypothesis", "*.egg-info", "*.py[co]")
"""What running a template leaves in it."""


def make(names: EnvironmentNames, template: str = "game", parent: Path | None = None) -> Path:
    """Make an environment's folder, whole or not at all.

    Args:
        names: What it is called.
        template: One of `TEMPLATES`.
        parent: Where; made where it is absent. The working directory by default.

    Returns:
        The folder.

    Raises:
        ConfigurationError: There is no such template, or the folder is there already or cannot be made.
    """
    if template not in TEMPLATES:
        near = get_close_matches(template, TEMPLATES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(TEMPLATES)}"
        raise ConfigurationError(f"expected a template, got {template!r}; {hint}")
    folder = (Path.cwd() if parent is None else parent) / names.package
    _refuse_what_is_there(folder)
    try:
        with _parent_of(folder), _unfinished(folder) as unfinished:
            _copy(_FOLDER / template, unfinished, names)
            # Takes the place of an empty folder too, and of no other.
            unfinished.rename(folder)
    except OSError as error:
        raise ConfigurationError(
            f"expected to make the folder {folder}, got: {error}; choose another place with --dir"
        ) from error
    return folder


def make_task(names: EnvironmentNames, parent: Path | None = None) -> list[Path]:
    """Make what trains a policy on the game: a task and a run's file, beside the environment's folder.

    Args:
        names: What the environment is called.
        parent: Where its folder is. The working directory by default.

    Returns:
        The files.

    Raises:
        ConfigurationError: One is there already, or cannot be written.
    """
    parent = Path.cwd() if parent is None else parent
    spell = _spelling(names)
    texts = {
        parent / spell(path.name): spell(path.read_text(encoding="utf-8"))
        for path in _files(_FOLDER / "task")
    }
    for path in texts:
        if os.path.lexists(path):
            raise ConfigurationError(
                f"expected no {path} yet, it is there; choose another name, or remove it"
            )
    try:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"expected to write a task into {parent}, got: {error}") from error
    return list(texts)


def _refuse_what_is_there(folder: Path) -> None:
    if not os.path.lexists(folder):
        return
    plain = folder.is_dir() and not folder.is_symlink()
    if plain and not any(folder.iterdir()):
        return
    what = "a folder with something in it" if plain else "something else of that name"
    raise ConfigurationError(
        f"expected no {folder} yet, got {what}; choose another name or another --dir, or remove it"
    )


@contextmanager
def _parent_of(folder: Path) -> Iterator[None]:
    """Make the folders above one; where the block fails, remove those that this made."""
    made: list[Path] = []
    try:
        for parent in reversed(folder.parents):
            if not parent.is_dir():
                parent.mkdir()
                made.append(parent)
        yield
    except BaseException:
        for parent in reversed(made):
            with suppress(OSError):  # somebody else's by now
                parent.rmdir()
        raise


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """Make a folder beside the one that it is to become, and remove it where the block fails."""
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield made
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _copy(template: Path, folder: Path, names: EnvironmentNames) -> None:
    """Copy a template into an empty folder, spelling its name in the new way wherever it stands."""
    spell = _spelling(names)
    # Contents alone: an installed package may be read-only, and what is made of it should not be.
    for path in _files(template):
        part = path.relative_to(template)
        if path.is_dir():
            (folder / part).mkdir()
        else:
            (folder / part).write_text(spell(path.read_text(encoding="utf-8")), encoding="utf-8")
    folder.chmod(0o777 & ~_umask())  # a temporary folder is its owner's alone


def _files(template: Path) -> Iterator[Path]:
    """Yield what a template has, folders before what is in them."""
    for path in sorted(template.rglob("*")):
        parts = path.relative_to(template).parts
        if not any(fnmatch(name, left_out) for name in parts for left_out in _LEFT_OUT):
            yield path


def _spelling(names: EnvironmentNames) -> Callable[[str], str]:
    """Return what spells the templates' name in the new way, wherever it stands in a text."""
    spellings = {
        PLACE_HOLDER.short: names.short,
        PLACE_HOLDER.short.replace("_", "-"): names.short.replace("_", "-"),
        PLACE_HOLDER.prefix: names.prefix,
        PLACE_HOLDER.title: names.title,
    }
    pattern = re.compile("|".join(map(re.escape, spellings)))
    return lambda text: pattern.sub(lambda found: spellings[found[0]], text)


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
