"""What code may read of the machine: Python, what is installed with it, and the system's libraries."""

import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

SYSTEM: Final = (
    "/usr",
    "/lib",
    "/lib64",
    "/lib32",
    "/bin",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
)

OURS: Final = (
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
"""Packages that hold what no solution may see: tasks with their tests, and how they are judged."""

_MANY: Final = 4096


def readable(more: Iterable[Path] = (), hidden: Iterable[Path] = ()) -> list[str]:
    """Return the files and folders that code may read, none of which holds a hidden one.

    A folder that holds a hidden one is replaced by its other entries.

    Args:
        more: Beside Python's and the system's.
        hidden: Not to be read, beside this project's own packages.
    """
    python = {Path(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    wanted = {path for path in (*map(Path, SYSTEM), *python, *more) if path.exists()}
    away = {path.resolve() for path in hidden} | _own_packages()
    found: list[Path] = []
    for path in sorted(wanted):
        if not any(path != other and path.is_relative_to(other) for other in wanted):
            found += _without(path, away)
    return [str(path) for path in found]


def _own_packages() -> set[Path]:
    folders = {Path(path) for path in (*site.getsitepackages(), *sysconfig.get_paths().values())}
    own = {folder / name for folder in folders for name in OURS}
    return {path.resolve() for path in own if path.exists()}


def _without(path: Path, away: set[Path]) -> list[Path]:
    real = path.resolve()
    if real in away:
        return []
    if not any(other.is_relative_to(real) for other in away):
        return [path]
    found: list[Path] = []
    for entry in sorted(path.iterdir()):
        if not entry.is_symlink():
            found += _without(entry, away)
        elif not any(
            entry.resolve().is_relative_to(other) or other.is_relative_to(entry.resolve()) for other in away
        ):
            found.append(entry)
    return found
