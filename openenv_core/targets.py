"""Resolves the target of a command: an environment's name, a folder, a module, a running server or an image."""

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol, cast

from openenv_core.errors import (
    ConfigurationError,
    EngineRefusedError,
    ImageNotFoundError,
    OpenEnvError,
    installed_with,
)
from openenv_core.manifest import MANIFEST, Manifest, ManifestError, read_keys, read_manifest
from openenv_core.one_file import name_class, read_file, read_file_manifest
from openenv_core.packages import ENVS, own_folder, spec_of

_URL = re.compile(r"(https?|wss?)://", re.IGNORECASE)
_MODULE = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<attribute>[A-Za-z_][\w.]*)")
_IMAGE = re.compile(
    r"(?:[A-Za-z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_SUFFIX: Final = "_env"

PORT: Final = 8000
"""Default port of servers in images."""

WITHOUT_TOKENS: Final = {"ROPEWALK_TOKENS": "", "ROPEWALK_TOKEN_FILE": ""}
"""Variables that turn off tokens for a server that a command starts for its own use."""


class TargetKind(StrEnum):
    """The kind of a target."""

    NAME = "name"
    PATH = "path"
    MODULE = "module"
    URL = "url"
    IMAGE = "image"


@dataclass(frozen=True, slots=True)
class Target:
    """A resolved target of a command.

    Attributes:
        kind: The kind of target.
        text: The argument of `ropewalk serve`, a URL, or an image's name.
        folder: The environment's folder on this machine, if any.
    """

    kind: TargetKind
    text: str
    folder: Path | None = None

    @property
    def file(self) -> tuple[Path, str] | None:
        """The Python file and the class in it, of an environment in one file."""
        if self.kind is not TargetKind.PATH or self.folder is not None:
            return None
        path, name = split_path(self.text)
        return (path, name) if path.suffix == ".py" and name in read_file(path).classes else None


@dataclass(frozen=True, slots=True)
class RunningTarget:
    """A running target, and the provider that started it, if any."""

    url: str
    provider: Any = None


def target_of(text: str, *, kind: TargetKind | None = None) -> Target:
    """Resolve a command's argument to a target.

    The kinds are tried in this order: URL, existing path, importable `module:attribute`, environment's name, image's
    name. A name with a tag or slash that is none of the others is an image.

    Args:
        text: The argument as typed.
        kind: The kind, if the text is ambiguous.

    Raises:
        ConfigurationError: The text matches no kind, or not the given one.
    """
    resolved_kind = kind or _kind_of(text)
    if resolved_kind is TargetKind.URL and not _URL.match(text):
        raise ConfigurationError(f"expected a URL, got {text!r}; begin with http:// or https://")
    if resolved_kind is TargetKind.PATH:
        text = name_class(text)
        path, attribute = split_path(text)
        if not path.exists():
            raise ConfigurationError(f"there is no folder or file at {text}; check the path")
        rest = f":{attribute}" if attribute else ""
        return Target(resolved_kind, f"{path.resolve()}{rest}", _enclosing_folder(path))
    if resolved_kind is TargetKind.MODULE:
        match = _MODULE.fullmatch(text)
        if match is None:
            raise ConfigurationError(f"expected module:attribute, got {text!r}")
        file = find_module(match["module"])
        return Target(resolved_kind, text, None if file is None else _enclosing_folder(file))
    if resolved_kind is TargetKind.NAME:
        return Target(resolved_kind, text, folder_of_name(text))
    return Target(resolved_kind, text)


@contextmanager
def run_target(
    target: Target,
    *,
    env_vars: Mapping[str, str] | None = None,
    start_timeout_s: float = 60.0,
    docker_options: Mapping[str, Any] | None = None,
) -> Iterator[RunningTarget]:
    """Run a target for the duration of the block; a URL is assumed to be running.

    Args:
        target: The target to run.
        env_vars: Environment variables of the server, in addition to this process's own.
        start_timeout_s: Seconds within which it must become healthy.
        docker_options: Arguments of `LocalDockerProvider`, for an image.

    Raises:
        ProviderError: It could not be started.
    """
    if target.kind is TargetKind.URL:
        yield RunningTarget(target.text.rstrip("/"))
        return
    provider = provider_of(
        target, env_vars=env_vars, start_timeout_s=start_timeout_s, docker_options=docker_options
    )
    try:
        yield RunningTarget(provider.start(), provider)
    finally:
        provider.stop()


def provider_of(
    target: Target,
    *,
    env_vars: Mapping[str, str] | None = None,
    start_timeout_s: float = 60.0,
    docker_options: Mapping[str, Any] | None = None,
    serve_options: tuple[str, ...] = (),
) -> Any:
    """Return a provider for a target, not started yet."""
    if target.kind is TargetKind.URL:
        raise ConfigurationError(f"expected something to start, got {target.text}, which runs already")
    if target.kind is TargetKind.IMAGE:
        from openenv_core.providers.docker import LocalDockerProvider

        options: dict[str, Any] = {"start_timeout_s": start_timeout_s, **(docker_options or {})}
        if "options" not in options:
            options.setdefault("port", exposed_port(target.text))
        if env_vars:
            options["env_vars"] = {**options.get("env_vars", {}), **env_vars}
        return LocalDockerProvider(target.text, **options)
    from openenv_core.providers.process import SERVE_COMMAND, LocalProcessProvider

    return LocalProcessProvider(
        target.text,
        env_vars={**WITHOUT_TOKENS, **(env_vars or {})},
        start_timeout_s=start_timeout_s,
        command=(*SERVE_COMMAND, *serve_options),
    )


def _kind_of(text: str) -> TargetKind:
    if _URL.match(text):
        return TargetKind.URL
    if (kind := _kind_of_existing(text)) is not None:
        return kind
    if text.startswith((".", "/", "~")) or text.endswith(".py"):
        return TargetKind.PATH
    match = _MODULE.fullmatch(text)
    if _IMAGE.fullmatch(text) and ("/" in text or ":" in text or _engine_knows(text)):
        # A dotted module that cannot be found is still taken for a module, unless an image has that name.
        module = match is not None and "." in match["module"] and not _engine_knows(text)
        return TargetKind.MODULE if module else TargetKind.IMAGE
    return TargetKind.MODULE if match is not None else TargetKind.NAME


def importable_kind(text: str) -> TargetKind:
    """Return whether a text is a path, module or name: the first that exists, otherwise the one that it looks like.

    Used like `target_of` for targets that can be neither a URL nor an image.
    """
    if (kind := _kind_of_existing(text)) is not None:
        return kind
    if ":" in text and not split_path(text)[1]:
        return TargetKind.MODULE
    return TargetKind.PATH if _is_path(text) or text.endswith(".py") else TargetKind.NAME


def _kind_of_existing(text: str) -> TargetKind | None:
    path, _ = split_path(text)
    if path.is_file() or (text and path.is_dir() and (_is_path(text) or is_environment_folder(path))):
        return TargetKind.PATH
    if (match := _MODULE.fullmatch(text)) is not None and find_module(match["module"]) is not None:
        return TargetKind.MODULE
    return None if folder_of_name(text) is None else TargetKind.NAME


def declared_by(target: Target) -> Manifest:
    """Return the manifest of a target on this machine: that of its folder, or what a Python file declares.

    Raises:
        ManifestError: It is missing or invalid.
    """
    if (file := target.file) is not None:
        return read_file_manifest(*file)
    if target.folder is None:
        raise ManifestError([f"expected {MANIFEST} of {target.text}, got none: it has no folder"])
    return read_manifest(target.folder)


def declared_reward_range(target: Target) -> tuple[float, float] | None:
    """Return the range of rewards that a target's manifest declares; None without a valid one."""
    try:
        reward = declared_by(target).validation.reward
    except ManifestError:
        return None
    return None if reward is None else reward.range


def variables_for(text: str, argument: str) -> dict[str, str]:
    """Return the environment variables that pass an argument to an environment.

    The argument becomes the value of the first entry of `variables` in its openenv.yaml.

    Raises:
        ConfigurationError: It has no openenv.yaml, or one without variables.
    """
    folder = target_of(text).folder
    variables = (
        read_keys(folder).get("variables") if folder is not None and (folder / MANIFEST).is_file() else None
    )
    first = next(iter(variables), None) if isinstance(variables, Mapping | list) else None
    name = first.get("name") if isinstance(first, Mapping) else first
    if not isinstance(name, str):
        raise ConfigurationError(
            f"expected an environment that takes an argument, got {text!r}, whose {MANIFEST} lists no variables; "
            f"leave {argument!r} out"
        )
    return {name: argument}


def exposed_port(image: str) -> int:
    """Return the one TCP port that an image exposes; 8000 if it exposes none or several.

    Raises:
        EngineUnavailableError: There is no engine.
        ImageNotFoundError: There is no such image.
    """
    from openenv_core.providers.docker.engine import DockerEngine

    try:
        config = DockerEngine.find().call("GET", f"/images/{image}/json").get("Config") or {}
    except EngineRefusedError as error:
        raise ImageNotFoundError(
            f"the local engine has no image {image!r}; `ropewalk build PATH` makes one"
        ) from error
    ports = [
        int(port)
        for port, _, kind in (entry.partition("/") for entry in config.get("ExposedPorts") or {})
        if kind == "tcp"
    ]
    return ports[0] if len(ports) == 1 else PORT


def target_exists(target: Target) -> bool:
    """Whether a target exists, without importing it; URLs, paths and images are assumed to exist."""
    if target.kind is TargetKind.MODULE:
        return find_module(target.text.partition(":")[0]) is not None
    return target.kind is not TargetKind.NAME or target.folder is not None


def is_environment_folder(folder: Path) -> bool:
    """Whether a folder has a manifest or a `server/app.py`."""
    return (folder / MANIFEST).is_file() or (folder / "server" / "app.py").is_file()


def _is_path(text: str) -> bool:
    return "/" in text or text.startswith(".")


def split_path(text: str) -> tuple[Path, str]:
    """Split `FILE:ATTRIBUTE` into path and attribute; the attribute is "" if there is none."""
    path = Path(os.path.expanduser(text))
    file_part, colon, attribute = text.rpartition(":")
    file = Path(os.path.expanduser(file_part))
    return (file, attribute) if colon and not path.exists() and file.is_file() else (path, "")


def _enclosing_folder(path: Path) -> Path | None:
    """Return the folder of the environment that contains a file; the path itself if it is a folder."""
    path = path.resolve()
    if path.is_dir():
        return path
    return next((folder for folder in path.parents if is_environment_folder(folder)), None)


def find_module(module: str) -> Path | None:
    """Return a module's file or a package's folder, without importing it; None if there is none.

    The working directory is searched before `sys.path`, except for our packages (`openenv_core.packages`).
    """
    spec = _find_spec(module)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.has_location and spec.origin else None


def folders_of_envs() -> list[str]:
    """Return the folders of the package `envs`, whose packages are environments."""
    spec = _find_spec(ENVS)
    return list((spec and spec.submodule_search_locations) or ())


def environment_packages() -> list[str]:
    """Return the packages of all environments that have a name, without importing them."""
    modules = pkgutil.iter_modules([*folders_of_envs(), str(Path.cwd()), *sys.path])
    names = {module.name for module in modules if module.ispkg and module.name.endswith(_SUFFIX)}
    return sorted({package for name in names if (package := package_of(name)) is not None})


def _find_spec(module: str) -> ModuleSpec | None:
    package, *rest = module.split(".")
    if not all(name_part.isidentifier() for name_part in (package, *rest)):
        return None
    importlib.invalidate_caches()
    path = [str(Path.cwd()), *sys.path]
    spec = spec_of(package, path) or PathFinder.find_spec(package, path)
    if spec is None:
        # Editable installs have finders of their own.
        with suppress(ImportError, ValueError):
            spec = find_spec(package)
    name = package
    for name_part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{name_part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def package_of(name: str) -> str | None:
    """Return the package of an environment's name, `envs.*` first; None if there is none."""
    short = name.lower().replace("-", "_").removesuffix(_SUFFIX)
    for package in (f"{ENVS}.{short}{_SUFFIX}", f"{short}{_SUFFIX}") if short.isidentifier() else ():
        if (folder := folder_of(package)) is not None and (folder / "server").is_dir():
            return package
    return None


def folder_of(package: str) -> Path | None:
    """Return the folder of an environment's package, ours if we have one of its name; None if there is none."""
    return own_folder(package) or find_module(package)


def folder_of_name(text: str) -> Path | None:
    """Return the folder of an environment's name; None if there is none."""
    package = package_of(text)
    return None if package is None else folder_of(package)


def _engine_knows(image: str) -> bool:
    """Whether the local Docker engine has an image of that name; False if there is no engine."""
    from openenv_core.providers.docker.engine import DockerEngine

    try:
        engine = DockerEngine.find()
        engine.ping()
        return engine.has_image(image)
    except OpenEnvError:  # no engine, or no response: unknown
        return False


APPS: Final = "ropewalk.apps"
"""Entry point of the function that imports applications: `servers` provides it, which this package must not import."""


class AppDescription(Protocol):
    """The attribute `served` of an application that `create_app` made: its environment.

    Attributes:
        factory: The environment class, or a callable without arguments that returns an environment.
        action: The action model, or a union of models.
        models: The models by the keys of /schema: action, observation, state, reset_observation.
        name: The environment's name; None for that of its class.
        cap: Maximum number of sessions.
    """

    factory: Callable[[], Any]
    action: Any
    models: dict[str, Any]
    name: str | None
    cap: int


def load_app(target: str) -> AppDescription:
    """Import a target's application and return its description.

    Args:
        target: `module:attribute`, a path, or an environment's name.

    Raises:
        ConfigurationError: The server's packages are not installed, the target does not exist, or its application
            was not made by `create_app` and so can be served but not inspected.
        Exception: Raised by the author's code during import.
    """
    from importlib.metadata import entry_points

    point = next(iter(entry_points(group=APPS)), None)
    if point is None:
        raise ConfigurationError(
            f"no installed package offers the entry point {APPS}; pip install 'ropewalk[server]'"
        )
    with installed_with("server", "the server's packages"):
        load = point.load()
    app = load(target)
    if not hasattr(app, "served"):
        raise ConfigurationError(
            f"expected {target!r} to be made by create_app, got {type(app).__name__}, which can be served "
            "but not looked into; return what create_app returns"
        )
    return cast(AppDescription, app.served)
