"""Lists environments and finds their source folders, without running any of their code."""

import ast
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openenv_core.errors import ConfigurationError
from openenv_core.manifest import MANIFEST, Manifest, ManifestError, read_manifest
from openenv_core.targets import (
    FORMS,
    TargetKind,
    environment_packages,
    find_module,
    folder_of,
    importable_target,
    name_of_package,
    split_path,
)
from servers.target import module_in


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
    found = {folder.resolve(): _as_path(folder.relative_to(Path.cwd())) for folder in _folders(Path.cwd())}
    for package in environment_packages():
        if (folder := folder_of(package)) is not None:
            found[folder.resolve()] = name_of_package(package)
    return _sort(_list_one(folder, target) for folder, target in found.items())


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


def _list_one(folder: Path, target: str) -> ListedEnvironment:
    manifest = Manifest(spec_version=1, name=folder.name)
    try:
        if (folder / MANIFEST).is_file():
            manifest = read_manifest(folder)
        flaw = _find_flaw(folder, manifest.app)
    except ManifestError as error:
        flaw = f"{MANIFEST}: {error}"
    project = _project(folder)
    version = manifest.version or project.get("version")
    about = manifest.description or project.get("description") or ""
    return ListedEnvironment(
        name=manifest.name,
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


def _find_flaw(folder: Path, app: str) -> str | None:
    """Return what is wrong with an environment's code, as far as can be told without running it."""
    module = app.partition(":")[0]
    if module_in(folder, module) is None and find_module(module) is None:
        return f"expected the app at {app}, got no {module.replace('.', '/')}.py in the folder"
    for file in sorted([*folder.glob("*.py"), *folder.glob("server/*.py")]):
        try:
            ast.parse(file.read_bytes(), str(file))
        except (OSError, SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            reason = getattr(error, "msg", None) or getattr(error, "strerror", None) or error
            return f"{file.relative_to(folder)}{f', line {line}' if line else ''}: {reason}"
    return None


def source_of(target: str) -> Path:
    """Return the folder of an environment's source, by a target as of `servers.target.load_app`.

    It is the environment's folder, else the outermost package around the module, else the folder of the module.

    Raises:
        ConfigurationError: The target does not exist.
    """
    resolved = importable_target(target)
    if resolved.folder is not None:
        return resolved.folder
    module = target.rpartition(":")[0]
    place = find_module(module) if resolved.kind is TargetKind.MODULE else split_path(resolved.text)[0]
    if place is None:
        raise ConfigurationError(
            f'expected an app at {target!r}, got: Could not import module "{module}"; {FORMS}, '
            "importable from here or installed"
        )
    folder = place.resolve().parent
    while (folder / "__init__.py").is_file() and (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return folder
