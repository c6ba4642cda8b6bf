"""Resolve the target of `ropewalk serve`: an environment's name, a folder or file, or a module and attribute.

Folders written for the released package are loaded here too: its import paths are supplied by
`openenv_core.compat`, with the server's own part from `servers.released`.
"""

import difflib
import importlib
import inspect
import keyword
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from openenv_core import compat
from openenv_core.errors import ConfigurationError
from openenv_core.manifest import MANIFEST, read_keys
from openenv_core.one_file import name_class
from openenv_core.packages import ENVS, add_ours, hidden_by_ours, own_folder
from openenv_core.targets import FORMS, TargetKind, importable_target, require_package, split_path
from openenv_core.tracebacks import in_place

APP: Final = "server.app:app"
"""Module and attribute of a folder's app, unless its manifest names others."""

_EXTRAS: Final = {
    "fastapi": "server",
    "gymnasium": "gymnasium",
    "reasoning_gym": "reasoning",
    "starlette": "server",
    "uvicorn": "server",
}
"""Our extra that installs each package."""

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def load_app(target: str) -> Any:
    """Import the application that a target names.

    Targets, in the order in which they are tried:

    - `MODULE:ATTRIBUTE`, importable from the working directory or installed;
    - a path: a folder (its manifest's `app`, else `server/app.py`), a manifest, or a Python file with an environment's
      class or an `app` (`FILE:ATTRIBUTE` for another name). A folder with an `__init__.py` is imported as a package,
      so that its relative imports work; any other is added to `sys.path`;
    - the name of an environment, in this tree or installed: `blackjack`, `blackjack_env`.

    Returns:
        An ASGI application, of `create_app` or any other.

    Raises:
        ConfigurationError: The target does not exist, it is not an ASGI application, or the released package is
            installed too.
        Exception: Whatever the environment's own code raised on import.
    """
    compat.install()
    importlib.invalidate_caches()
    where = str(Path.cwd())
    if where not in sys.path:
        sys.path.insert(0, where)
    app = _load(target)
    if isinstance(app, type):
        from openenv_core.environment import (
            Environment,
        )  # not before `compat` has looked whose package that is
        from servers.app import create_app

        app = create_app(app) if issubclass(app, Environment) else app
    if not is_asgi(app):
        raise ConfigurationError(
            f"expected an ASGI app at {target!r}, as create_app returns it, got {type(app).__name__}"
        )
    return app


def is_asgi(app: object) -> bool:
    """Whether a value can be called as `await app(scope, receive, send)`."""
    if inspect.isclass(app) or not callable(app):
        return False
    if not (inspect.iscoroutinefunction(app) or inspect.iscoroutinefunction(type(app).__call__)):
        return False
    try:
        inspect.signature(app).bind({}, None, None)
    except (TypeError, ValueError):
        return False
    return True


def _load(target: str) -> Any:
    kind = importable_target(target).kind
    if kind is TargetKind.NAME:
        package = require_package(target)
        if own_folder(package) is not None:
            add_ours(ENVS)
        return _attribute(_import(f"{package}.server.app", target), "app", target)
    if kind is TargetKind.MODULE:
        module, _, attribute = target.rpartition(":")
        return _attribute(_import(module, target), attribute, target)
    path, attribute = split_path(target)
    if path.is_file() and path.name == MANIFEST:
        path = path.parent
    if path.is_file():
        _, attribute = split_path(name_class(target))
        return _attribute(_from_file(path.resolve(), target), attribute or "app", target)
    if (app := _app_of(path.resolve())) is None:
        raise ConfigurationError(
            f"expected an environment in the folder {target}, got neither {MANIFEST} nor server/app.py there; "
            "name the folder that holds them"
        )
    module, _, attribute = app.partition(":")
    return _attribute(_from_folder(path.resolve(), module, target), attribute, target)


def _app_of(folder: Path) -> str | None:
    """Return `module:attribute` of a folder's app; None if the folder has neither a manifest nor `server/app.py`."""
    if (folder / MANIFEST).is_file():
        return _app_key(folder) or APP
    return APP if (folder / "server" / "app.py").is_file() else None


def _app_key(folder: Path) -> str | None:
    value = read_keys(folder).get("app")
    if value is None:
        return None
    module, _, attribute = str(value).partition(":")
    if not _DOTTED.fullmatch(module) or not attribute.isidentifier():
        raise ConfigurationError(f"expected `app: module:attribute` in {folder / MANIFEST}, got {value!r}")
    return str(value)


def _from_folder(folder: Path, module: str, target: str) -> ModuleType:
    inner = module_in(folder, module)
    return _import(module, target) if inner is None else _import_below(folder, inner, target)


def module_in(folder: Path, module: str) -> str | None:
    """Return the name within a folder of a module that its manifest names; None if it is somewhere else.

    A manifest may have the absolute import path, below the folder's own name.
    """
    parts, name = module.split("."), _package_name(folder)
    below = parts[parts.index(name) + 1 :] if name in parts else []
    return next((".".join(each) for each in (parts, below) if _has_module(folder, each)), None)


def _import_below(folder: Path, module: str, target: str) -> ModuleType:
    """Import a module by its name within a folder, as part of the folder's package if it is one."""
    if _is_package(folder):
        name = _package_name(folder)
        _package(folder, name)
        # For folders that fall back to absolute imports where relative ones fail; last in the path.
        _put_on_path(folder, len(sys.path))
        return _import(f"{name}.{module}", target)
    _put_on_path(folder, 0)
    imported = _import(module, target)
    _check_place(imported, folder)
    return imported


def _has_module(folder: Path, parts: list[str]) -> bool:
    place = folder.joinpath(*parts)
    return bool(parts) and (place.with_suffix(".py").is_file() or place.is_dir())


def _from_file(file: Path, target: str) -> ModuleType:
    if file.suffix != ".py" or not _is_module_name(file.stem):
        raise ConfigurationError(f"expected a Python file whose name can be imported, got {target}")
    folder, parts = file.parent, [file.stem]
    while _is_package(folder) and _is_package(folder.parent):
        parts.insert(0, _package_name(folder))
        folder = folder.parent
    return _import_below(folder, ".".join(parts), target)


def _package_name(folder: Path) -> str:
    """Return the package name of a folder, if it can be imported.

    A clone is often named after its repository, `my-env`, while its own imports say `my_env`.
    """
    return re.sub(r"\W", "_", folder.name)


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file() and _is_module_name(_package_name(folder))


def _package(folder: Path, name: str) -> None:
    """Import a folder as a package, without adding its parent folder to `sys.path`."""
    if (loaded := sys.modules.get(name)) is not None:
        _check_place(loaded, folder)
        return
    file = folder / "__init__.py"
    spec = spec_from_file_location(name, file, submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    except BaseException as error:
        del sys.modules[name]
        _explain(error, str(folder), name)
        raise


def _check_place(module: ModuleType, folder: Path) -> None:
    location = getattr(module, "__file__", None)
    if location is None or not Path(location).resolve().is_relative_to(folder):
        raise ConfigurationError(
            f"expected to import {module.__name__} from {folder}, got the one of {location or 'this interpreter'}; "
            "rename the folder or file"
        )


def _put_on_path(folder: Path, position: int) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(position, str(folder))


def _is_module_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _import(module: str, target: str) -> ModuleType:
    """Import a module; exceptions of its own code propagate with their traceback, for its author."""
    if not _DOTTED.fullmatch(module):
        raise ConfigurationError(f"expected an app at {target!r}, got no module {module!r}; {FORMS}")
    try:
        return importlib.import_module(module)
    except Exception as error:
        _explain(error, target, module)
        raise


def _explain(error: BaseException, target: str, module: str) -> None:
    """Raise a ConfigurationError that explains an import error to its user; return if the traceback does so better."""
    cause: BaseException | None = error
    while cause is not None:
        # Folders try one import after another, so the relevant error may be the context of the last one.
        if isinstance(cause, compat.NotProvidedError):
            raise ConfigurationError(
                f"expected to import the app {target!r}, got{in_place(cause)}"
            ) from error
        cause = cause.__context__
    if isinstance(error, ImportError) and (hidden := hidden_by_ours(error.name or "")) is not None:
        raise ConfigurationError(
            f"cannot import the app {target!r}: {error}; Ropewalk's own package of that name hides {hidden}: "
            "rename it"
        ) from error
    if not isinstance(error, ModuleNotFoundError):
        return
    missing = error.name or ""
    if module == missing or module.startswith(f"{missing}."):
        raise ConfigurationError(
            f'expected an app at {target!r}, got: Could not import module "{missing}"; {FORMS}, '
            "importable from here or installed"
        ) from error
    extra = _EXTRAS.get(missing.partition(".")[0])
    remedy = f"pip install 'ropewalk[{extra}]'" if extra else "install what it needs"
    raise ConfigurationError(
        f"expected to import the app {target!r}, got{in_place(error)}; {remedy}"
    ) from error


def _attribute(module: ModuleType, name: str, target: str) -> Any:
    value: Any = module
    for component in name.split("."):
        try:
            value = getattr(value, component)
        except AttributeError:
            near = difflib.get_close_matches(component, dir(value), n=1)
            raise ConfigurationError(
                f'expected an app at {target!r}, got: Attribute "{name}" not found in module "{module.__name__}"; '
                + (f"did you mean {near[0]!r}?" if near else FORMS)
            ) from None
    return value
