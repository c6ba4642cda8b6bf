"""Makes an environment from a template, under a new name: a file with its test, or a folder; and a task for it."""

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.one_file import name_class
from openenv_core.scaffold.names import PLACE_HOLDER, EnvironmentNames
from openenv_core.scaffold.task import task_text
from openenv_core.targets import split_path

TEMPLATES: Final[Mapping[str, str]] = {
    "game": "a number to guess: rules in one file",
    "tools": "a question to answer by calling tools",
    "gymnasium": "one of Gymnasium's environments, by its id",
}
"""Descriptions of the templates. The first is complete; the folders of the others have only the files that differ."""

_EXTRAS: Final[Mapping[str, str]] = {"game": "server", "tools": "mcp,server", "gymnasium": "gymnasium,server"}
"""Ropewalk's extras that each template requires."""

_FOLDER: Final = Path(__file__).with_name("templates")
_LEFT_OUT: Final = ("__pycache__", ".pytest_cache", ".hypothesis", "*.egg-info", "*.py[co]")
"""Files that running a template leaves in its folder."""


def make(names: EnvironmentNames, template: str = "game", parent: Path | None = None) -> Path:
    """Make an environment's folder, which may exist but must be empty, and return it.

    Raises:
        ConfigurationError: The template does not exist, or the folder has files or cannot be made.
    """
    if template not in TEMPLATES:
        near = get_close_matches(template, TEMPLATES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(TEMPLATES)}"
        raise ConfigurationError(f"expected a template, got {template!r}; {hint}")
    folder = (parent or Path.cwd()) / names.package
    _require_absent(folder)
    texts = _read("game") | _read(template)
    texts["pyproject.toml"] = texts["pyproject.toml"].replace("[server]", f"[{_EXTRAS[template]}]")
    _write_new(_rename_texts(texts, names), folder)
    return folder


def make_file(names: EnvironmentNames, parent: Path | None = None) -> list[Path]:
    """Write an environment in one file, and its test; return both."""
    return _write_new(_rename_texts(_read("file"), names), parent or Path.cwd())


def make_file_task(names: EnvironmentNames, parent: Path | None = None) -> list[Path]:
    """Write a task and a run's configuration for training on the environment in a file next to them.

    Raises:
        ConfigurationError: The file has no environment, or the files exist.
        Exception: Raised by the file's own code.
    """
    parent = parent or Path.cwd()
    file = parent / f"{names.short}.py"
    texts = _rename_texts(_read("file_task"), names)
    texts[f"{names.short}_task.py"] = task_text(names, *split_path(name_class(str(file))))
    return _write_new(texts, parent)


def make_task(names: EnvironmentNames, parent: Path | None = None) -> list[Path]:
    """Write a task and a run's configuration for training on the game, next to the environment's folder."""
    return _write_new(_rename_texts(_read("task"), names), parent or Path.cwd())


def _write_new(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Write files, none of which may exist; return their paths."""
    paths = {folder / name: text for name, text in texts.items()}
    for path in paths:
        if os.path.lexists(path):
            raise ConfigurationError(f"expected no {path} yet, it is there; choose another name or remove it")
    try:
        for path, text in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"expected to write into {folder}, got: {error}; choose another place"
        ) from error
    return list(paths)


def _require_absent(folder: Path) -> None:
    if not os.path.lexists(folder):
        return
    is_real_folder = folder.is_dir() and not folder.is_symlink()
    if is_real_folder and not any(folder.iterdir()):
        return
    existing = "a folder with something in it" if is_real_folder else "something else of that name"
    raise ConfigurationError(f"expected no {folder} yet, got {existing}; choose another name, or remove it")


def _read(template: str) -> dict[str, str]:
    """Return the texts of a template's files by relative path."""
    texts = {}
    for path in sorted((_FOLDER / template).rglob("*")):
        name = path.relative_to(_FOLDER / template)
        if path.is_file() and not any(
            fnmatch(name_part, left) for name_part in name.parts for left in _LEFT_OUT
        ):
            texts[name.as_posix()] = path.read_text(encoding="utf-8")
    return texts


def _rename_texts(texts: Mapping[str, str], names: EnvironmentNames) -> dict[str, str]:
    """Return the files with the place holder replaced by the new name, in paths and texts."""
    spellings = {
        PLACE_HOLDER.short: names.short,
        PLACE_HOLDER.short.replace("_", "-"): names.short.replace("_", "-"),
        PLACE_HOLDER.prefix: names.prefix,
        PLACE_HOLDER.title: names.title,
    }
    pattern = re.compile("|".join(map(re.escape, spellings)))

    def substitute(text: str) -> str:
        return pattern.sub(lambda match: spellings[match[0]], text)

    return {substitute(name): substitute(text) for name, text in texts.items()}
