"""Lists environments and finds their source folders, without running any of their code."""

import ast
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, Final

from openenv_core.errors import ConfigurationError
from openenv_core.manifest import MANIFEST, ManifestError, parse_manifest, read_keys
from openenv_core.packages import ENVS
from openenv_core.targets import (
    FORMS,
    TargetKind,
    find_module,
    folder_of,
    folders_of_envs,
    importable_target,
    is_environment_folder,
    package_of,
    split_path,
)
from servers.target import APP

_SUFFIX: Final = "_env"
_DISTRIBUTION: Final = re.compile(r"openenv[-_.](?P<name>.+)", re.IGNORECASE)
"""Names of distributions, as the scaffold chooses them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedEnvironment:
    """One environment of a listing.

    Attributes:
        name: Its own name.
        version: Its version; None if it declares none.
        description: One line; empty if it has none.
        where: Its folder.
        target: The argument by which `ropewalk serve` and related commands find it.
        error: Why it cannot be served, as far as can be told without running it; None if no reason is found.
    """

    name: str
    version: str | None
    description: str
    where: str
    target: str
    error: str | None = None


def environments_below(folder: Path) -> list[ListedEnvironment]:
    """Return the environments in a folder: the folder itself, and those one or two levels below.

    Raises:
        ConfigurationError: The folder does not exist.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"expected a folder to look into, got {folder}")
    return _sort(_list_one(each, _as_path(each)) for each in _folders(folder))


def environments() -> list[ListedEnvironment]:
    """Return the environments that can be served by name, and those in the working directory."""
    listed: dict[Path, ListedEnvironment] = {}
    for package in _packages():
        folder = folder_of(package)
        if folder is not None and folder.is_dir() and is_environment_folder(folder):
            listed.setdefault(folder.resolve(), _list_one(folder.resolve(), _target(package, folder)))
    for folder in _folders(Path.cwd()):
        listed.setdefault(folder.resolve(), _list_one(folder, _as_path(folder.relative_to(Path.cwd()))))
    return _sort(listed.values())


def _sort(listed: Iterable[ListedEnvironment]) -> list[ListedEnvironment]:
    return sorted(listed, key=lambda environment: (environment.name, environment.where))


def _as_path(folder: Path) -> str:
    """Return a path in a form that cannot be mistaken for a name."""
    return str(folder) if folder.is_absolute() or str(folder).startswith(".") else f"./{folder}"


def _folders(top: Path) -> Iterator[Path]:
    for pattern in (MANIFEST, f"*/{MANIFEST}", f"*/*/{MANIFEST}"):
        for manifest in sorted(top.glob(pattern)):
            if not any(name.startswith(".") for name in manifest.relative_to(top).parts):
                yield manifest.parent


def _packages() -> Iterator[str]:
    """Yield the names of packages that may be environments, those of this tree first."""
    yield from (f"{ENVS}.{module.name}" for module in pkgutil.iter_modules(folders_of_envs()) if module.ispkg)
    modules = pkgutil.iter_modules([str(Path.cwd()), *sys.path])
    yield from sorted({module.name for module in modules if module.ispkg and module.name.endswith(_SUFFIX)})
    for distribution in distributions():
        if (match := _DISTRIBUTION.fullmatch(distribution.name or "")) is not None:
            yield from _modules(distribution, match["name"].replace("-", "_"))


def _modules(distribution: Distribution, name: str) -> list[str]:
    """Return candidates for a distribution's packages, by name: an editable install does not list their files."""
    text = distribution.read_text("top_level.txt") or ""
    names = {line.strip() for line in text.splitlines()}
    return [candidate for candidate in sorted(names | {name, f"{name}{_SUFFIX}"}) if candidate.isidentifier()]


def _target(package: str, folder: Path) -> str:
    """Return the environment's short name if that resolves to the package, else the module of its app."""
    short = package.rpartition(".")[2].removesuffix(_SUFFIX)
    return short if package_of(short) == package else f"{package}.{APP}"


def _list_one(folder: Path, target: str) -> ListedEnvironment:
    keys: dict[str, Any] = {}
    flaw: str | None
    try:
        if (folder / MANIFEST).is_file():
            keys = read_keys(folder)
            parse_manifest(keys)
        flaw = _find_flaw(folder, str(keys.get("app") or APP))
    except ManifestError as error:
        flaw = f"{MANIFEST}: {error}"
    except Exception as error:  # a listing reports whatever is broken
        keys, flaw = {}, f"{type(error).__name__}: {error}"
    project = _project(folder)
    about = keys.get("description") or project.get("description") or _docstring(folder)
    version = keys.get("version") or project.get("version")
    return ListedEnvironment(
        name=str(keys.get("name") or folder.name),
        version=None if version is None else str(version),
        description=" ".join(str(about).split()),
        where=str(folder.resolve()),
        target=target,
        error=flaw,
    )


def _project(folder: Path) -> dict[str, Any]:
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8-sig")).get(
            "project", {}
        )
    except (OSError, ValueError):
        return {}
    return project if isinstance(project, dict) else {}


def _docstring(folder: Path) -> str:
    try:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8-sig")))
    except (OSError, ValueError, SyntaxError):
        return ""
    # The first sentence only: the rest is about the package.
    return re.split(r"(?<=[.!?])\s|\n\s*\n", text or "", maxsplit=1)[0]


def _find_flaw(folder: Path, app: str) -> str | None:
    """Return what is wrong with an environment's code, as far as can be told without running it."""
    module, _, _ = app.partition(":")
    parts = module.split(".")
    if folder.name.replace("-", "_") in parts:
        parts = parts[parts.index(folder.name.replace("-", "_")) + 1 :]
    place = folder.joinpath(*parts)
    if (
        not (place.with_suffix(".py").is_file() or (place / "__init__.py").is_file())
        and find_module(module) is None
    ):
        return f"expected the app at {app}, got no {'/'.join(parts)}.py in the folder"
    for file in sorted([*folder.glob("*.py"), *folder.glob("server/*.py")]):
        try:
            ast.parse(file.read_bytes(), str(file))
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            reason = getattr(error, "msg", None) or error
            return f"{file.relative_to(folder)}{f', line {line}' if line else ''}: {reason}"
    return None


_FOLDERS_UP: Final = 2
"""How many folders above its app a manifest may be; for `server/app.py` it is one."""


def source_of(target: str) -> Path:
    """Return the folder of an environment's source, by a target as of `servers.target.load_app`.

    Raises:
        ConfigurationError: The target does not exist.
    """
    resolved = importable_target(target)
    if resolved.kind is TargetKind.MODULE:
        module = target.rpartition(":")[0]
        place = find_module(module)
        if place is None:
            raise ConfigurationError(
                f'expected an app at {target!r}, got: Could not import module "{module}"; {FORMS}, '
                "importable from here or installed"
            )
    else:
        folder = resolved.folder if resolved.kind is TargetKind.NAME else None
        place = folder or split_path(target)[0]
    return _enclosing_folder(place.resolve())


def _enclosing_folder(path: Path) -> Path:
    """Return the environment's folder around a path, else the outermost package around it, else its own folder."""
    folder = path if path.is_dir() else path.parent
    for candidate in (folder, *folder.parents[:_FOLDERS_UP]):
        if (candidate / MANIFEST).is_file():
            return candidate
    while (folder / "__init__.py").is_file() and (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return folder
