"""Where an environment's source is, found without running any of it."""

from pathlib import Path
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.targets import find_module, package_of
from servers.target import FORMS, MANIFEST

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
    if _is_name(target) and (package := package_of(target)) is not None:
        return _of_module(package, target)
    if path.exists():
        return _around(path.resolve())
    raise ConfigurationError(f"expected an environment's source at {target!r}, got none; {FORMS}")


def _is_name(target: str) -> bool:
    return target.replace("-", "_").isidentifier()


def _of_module(module: str, target: str) -> Path:
    found = find_module(module)
    if found is None:
        raise ConfigurationError(
            f'expected an app at {target!r}, got: Could not import module "{module}"; {FORMS}, '
            "importable from here or installed"
        )
    return _around(found.resolve())


def _around(path: Path) -> Path:
    """Return the environment's folder that a file or folder belongs to, else its outermost package, else its folder."""
    folder = path if path.is_dir() else path.parent
    for candidate in (folder, *folder.parents[:_FOLDERS_UP]):
        if (candidate / MANIFEST).is_file():
            return candidate
    while (folder / "__init__.py").is_file() and (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return folder
