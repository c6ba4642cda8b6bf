"""Selects the files of this machine that code may read."""

import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_SYSTEM: Final = (
    "/usr",
    "/lib",
    "/lib64",
    "/lib32",
    "/bin",
    "/sbin",
    "/etc/alternatives",  # on Debian, /usr/bin/awk and many others are links into it
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
)

_OURS: Final = (
    "openenv_core",
    "servers",
    "envs",
    "rl_bridge",
    "dockerfiles",
    "examples",
    "benchmarks",
    "tests",
    "code_interpreter_env",
)
"""Packages that code may not see: they contain the tasks' tests and grading."""


def find_readable(
    more: Iterable[Path] = (), hidden: Iterable[Path] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files and folders that code may read, and those below them that it may not.

    Args:
        more: Readable paths besides Python's and the system's.
        hidden: Hidden paths besides this project's packages.
    """
    python = {Path(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    candidates = {path for path in (*map(Path, _SYSTEM), *python, *more) if path.exists()}
    paths = [
        path
        for path in candidates
        if not any(path != other and path.is_relative_to(other) for other in candidates)
    ]
    own = (folder / name for folder in _places() for name in _OURS)
    unreadable = {path.resolve() for path in (*hidden, *own) if path.exists()}
    below = [path for path in unreadable if any(path.is_relative_to(other.resolve()) for other in paths)]
    return tuple(sorted(map(str, paths))), tuple(sorted(map(str, below)))


def _places() -> set[Path]:
    """Return the folders for packages, of this environment and of the Python beneath it, and this project's own."""
    beneath = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    paths = [*site.getsitepackages(prefixes), *sysconfig.get_paths().values()]
    for scheme in sysconfig.get_scheme_names():
        paths += sysconfig.get_paths(scheme, beneath).values()
    # A checkout, or the target of an editable installation, may be inside a readable folder.
    return {*map(Path, paths), Path(__file__).resolve().parents[2]}


def without_hidden(shown: Iterable[str], hidden: Iterable[str]) -> tuple[str, ...]:
    """Return the readable paths, with each folder that contains a hidden path replaced by its other entries."""
    unreadable = {Path(path) for path in hidden}
    # Resolved, because `_without` drops links, and the target of a link here (a virtual environment, for example) is
    # not listed itself.
    return tuple(str(visible) for path in shown for visible in _without(Path(path).resolve(), unreadable))


def _without(path: Path, unreadable: set[Path]) -> list[Path]:
    real = path.resolve()
    if any(real.is_relative_to(other) for other in unreadable):
        return []
    if not any(other.is_relative_to(real) for other in unreadable):
        return [path]
    if path.is_symlink():
        return []  # its target is listed under its own path, or is not readable
    return [visible for entry in sorted(path.iterdir()) for visible in _without(entry, unreadable)]
