"""Where an environment's source is, found without running any of it."""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Final

from openenv_core.errors import ConfigurationError
from servers.target import FORMS, MANIFEST, packages_of

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
        if find(package) is not None:
            return _of_module(package, target)
    if path.exists():
        return _around(path.resolve())
    raise ConfigurationError(f"expected an environment's source at {target!r}, got none; {FORMS}")


def import_from_here() -> None:
    """Make the working directory importable, as `load_app` does."""
    if (where := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, where)
    importlib.invalidate_caches()


def find(module: str) -> Path | None:
    """Return the file of a module, or the folder of a package; None where there is none."""
    import_from_here()
    top, *rest = module.split(".")
    if not all(part.isidentifier() for part in (top, *rest)):
        return None
    # Asked of everybody who finds modules, for installations of source trees have ways of their own. Finding
    # what lies below in this way would import the packages above it.
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return None if spec is None else _place(spec)


def _is_name(target: str) -> bool:
    return target.replace("-", "_").isidentifier()


def _of_module(module: str, target: str) -> Path:
    found = find(module)
    if found is None:
        raise ConfigurationError(
            f'expected an app at {target!r}, got: Could not import module "{module}"; {FORMS}, '
            "importable from here or installed"
        )
    return _around(found.resolve())


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
