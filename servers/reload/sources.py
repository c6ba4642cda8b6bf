"""Which files an environment is made of, found without running any of them."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Final

from openenv_core.errors import ConfigurationError
from servers.target import FORMS, MANIFEST, packages_of

SUFFIXES: Final = frozenset({".py", ".yaml", ".yml", ".json"})

IGNORED: Final = frozenset(
    {
        "__pycache__",
        "build",
        "dist",
        "htmlcov",
        "logs",
        "node_modules",
        "output",
        "outputs",
        "runs",
        "site-packages",
        "tests",
        "venv",
    }
)
"""Folders inside an environment's that nothing is served from; so are those whose names begin with a dot."""

_FOLDERS_UP: Final = 2
"""How far above an app its manifest may be: `server/app.py` is one below."""


def source_of(target: str) -> Path:
    """Return the folder that an environment's source is in; for the forms see `servers.target.load_app`.

    Raises:
        ConfigurationError: There is no such thing.
    """
    path = Path(target)
    before, colon, _ = target.rpartition(":")
    if colon and not path.exists():
        path = Path(before)
        if not path.is_file():
            return _of_module(before, target)
    if path.exists() and not (path.is_dir() and _is_name(target) and not (path / MANIFEST).is_file()):
        return _around(path.resolve())
    for package in packages_of(target) if _is_name(target) else ():
        if _find(package) is not None:
            return _of_module(package, target)
    if path.exists():
        return _around(path.resolve())
    raise ConfigurationError(f"expected an environment's source at {target!r}, got none; {FORMS}")


class SourceFilter:
    """Tells a change of the source from all the others in its folders.

    Args:
        roots: The folders that are watched.
    """

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = tuple(roots)

    def __call__(self, change: object, path: str) -> bool:
        """Whether a change of this file is one of the source."""
        file = Path(path)
        return file.suffix in SUFFIXES and any(self._counts(file, root) for root in self._roots)

    def _counts(self, file: Path, root: Path) -> bool:
        if not file.is_relative_to(root):
            return False
        *folders, name = file.relative_to(root).parts
        return not name.startswith(".") and not any(
            folder in IGNORED or folder.startswith(".") or folder.endswith(".egg-info") for folder in folders
        )


def _is_name(target: str) -> bool:
    return target.replace("-", "_").isidentifier()


def _of_module(module: str, target: str) -> Path:
    found = _find(module)
    if found is None:
        raise ConfigurationError(
            f'expected an app at {target!r}, got: Could not import module "{module}"; {FORMS}, '
            "importable from here or installed"
        )
    return _around(found.resolve())


def _find(module: str) -> Path | None:
    """Return the file of a module, or the folder of a package."""
    if (where := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, where)  # as `load_app` does
    importlib.invalidate_caches()
    top, *rest = module.split(".")
    if not all(part.isidentifier() for part in (top, *rest)):
        return None
    # Asked of everybody who finds modules, for installations of source trees have ways of their own. Finding
    # what lies below in this way would import the packages above it.
    spec = importlib.util.find_spec(top)
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return None if spec is None else _place(spec)


def _place(spec: ModuleSpec) -> Path | None:
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.has_location and spec.origin else None


def _around(path: Path) -> Path:
    """Return the environment's folder that a file or folder belongs to, else its outermost package, else its folder."""
    folder = path if path.is_dir() else path.parent
    for candidate in (folder, *folder.parents[:_FOLDERS_UP]):
        if (candidate / MANIFEST).is_file():
            return candidate
    while (folder / "__init__.py").is_file() and (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return folder
