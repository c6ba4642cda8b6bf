"""Resolves the target of a command: an environment's name, a folder, a module, a running server or an image."""

import difflib
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
    EngineUnavailableError,
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
_BARE_NAME = re.compile(r"[\w-]+")
_SUFFIX: Final = "_env"
_DISTRIBUTION: Final = re.compile(r"openenv[-_.](?P<name>.+)", re.IGNORECASE)
"""Names of distributions, as the scaffold chooses them."""

IMAGE_SCHEME: Final = "docker://"
"""Begins a target that is an image, whatever else has its name."""

FORMS: Final = "Give FILE.py, module:attribute, a folder such as '.', or the name of an environment"
"""Targets that are imported."""

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


def target_of(text: str) -> Target:
    """Resolve a command's argument to a target.

    It is the first of these: `docker://IMAGE`, a URL, an existing path, an importable `module:attribute`, an
    environment's name, and last an image that the local engine has. A misspelt path or name is an error at once; the
    engine is not asked.

    Raises:
        ConfigurationError: The text matches no kind.
    """
    return find_target(text) or _misspelt(text) or _image_or_module(text)


def find_target(text: str) -> Target | None:
    """Return the target that a text names outright or that exists here, if any; no engine is asked."""
    if text.startswith(IMAGE_SCHEME):
        return _target_as(text, TargetKind.IMAGE)
    kind = TargetKind.URL if _URL.match(text) else _kind_of_existing(text)
    return None if kind is None else _target_as(text, kind)


def _target_as(text: str, kind: TargetKind) -> Target:
    """Return the target of a kind; ConfigurationError if the text cannot be one."""
    if kind is TargetKind.IMAGE:
        image = text.removeprefix(IMAGE_SCHEME)
        if not _IMAGE.fullmatch(image):
            raise ConfigurationError(f"expected {IMAGE_SCHEME} and the name of an image, got {text!r}")
        return Target(kind, image)
    if kind is TargetKind.PATH:
        text = name_class(text)
        path, attribute = split_path(text)
        if not path.exists():
            raise ConfigurationError(
                f"there is no folder or file at {text}; {_near_path(path) or 'check the path'}"
            )
        return Target(kind, f"{path.resolve()}{attribute and f':{attribute}'}", _enclosing_folder(path))
    if kind is TargetKind.MODULE:
        match = _MODULE.fullmatch(text)
        if match is None:
            raise ConfigurationError(f"expected module:attribute, got {text!r}")
        file = find_module(match["module"])
        return Target(kind, text, None if file is None else _enclosing_folder(file))
    if kind is TargetKind.NAME:
        return Target(kind, text, folder_of(require_package(text)))
    return Target(kind, text)


def _misspelt(text: str) -> Target | None:
    """Return a module that may be importable in the end, or None for a text that may be an image.

    Raises:
        ConfigurationError: The text can only be a path, or resembles an environment's name.
    """
    parent = text.partition("/")[0]
    is_path = text.startswith((".", "/", "~")) or text.endswith(("/", ".py"))
    if is_path or (parent != text and Path(parent).is_dir()):
        return _target_as(text, TargetKind.PATH)
    if _near_names(text):
        return _target_as(text, TargetKind.NAME)
    match = _MODULE.fullmatch(text)
    is_module = match is not None and ("." in match["module"] or match["attribute"] == "app")
    return _target_as(text, TargetKind.MODULE) if is_module else None


def _image_or_module(text: str) -> Target:
    """Return the target of a text that names nothing here: an image that the engine has, or else a module.

    Raises:
        ConfigurationError: It is neither.
    """
    missing = _missing_image(text) if _IMAGE.fullmatch(text) else "no image has such a name"
    if not missing:
        return Target(TargetKind.IMAGE, text)
    if _MODULE.fullmatch(text):
        return _target_as(text, TargetKind.MODULE)
    raise ConfigurationError(
        f"expected an environment's name, got {text!r}; {_names_hint(text)} {FORMS}, a URL, or {IMAGE_SCHEME}IMAGE "
        f"({missing})"
    )


@contextmanager
def run_target(target: Target) -> Iterator[RunningTarget]:
    """Run a target for the duration of the block; a URL is assumed to be running.

    Raises:
        ProviderError: It could not be started.
    """
    if target.kind is TargetKind.URL:
        yield RunningTarget(target.text.rstrip("/"))
        return
    provider = provider_of(target)
    try:
        yield RunningTarget(provider.start(), provider)
    finally:
        provider.stop()


def provider_of(
    target: Target,
    *,
    env_vars: Mapping[str, str] | None = None,
    start_timeout_s: float = 60.0,
) -> Any:
    """Return a provider for a target, not started yet."""
    if target.kind is TargetKind.URL:
        raise ConfigurationError(f"expected something to start, got {target.text}, which runs already")
    if target.kind is TargetKind.IMAGE:
        from openenv_core.providers.docker import LocalDockerProvider

        return LocalDockerProvider(
            target.text,
            port=exposed_port(target.text),
            env_vars=env_vars or {},
            start_timeout_s=start_timeout_s,
        )
    from openenv_core.providers.process import LocalProcessProvider

    return LocalProcessProvider(
        target.text, env_vars={**WITHOUT_TOKENS, **(env_vars or {})}, start_timeout_s=start_timeout_s
    )


def importable_target(text: str) -> Target:
    """Resolve a target that is imported here: a path, `module:attribute` or an environment's name.

    Raises:
        ConfigurationError: The text is another target, or nothing has that path or name.
    """
    kind = TargetKind.MODULE if ":" in text else TargetKind.NAME
    target = find_target(text) or _misspelt(text) or _target_as(text, kind)
    if target.kind in (TargetKind.URL, TargetKind.IMAGE):
        raise ConfigurationError(f"expected something to import, got {text}. {FORMS}")
    return target


def _kind_of_existing(text: str) -> TargetKind | None:
    path, _ = split_path(text)
    is_path = "/" in text or text.startswith(".")
    if path.is_file() or (text and path.is_dir() and (is_path or is_environment_folder(path))):
        return TargetKind.PATH
    if (match := _MODULE.fullmatch(text)) is not None and find_module(match["module"]) is not None:
        return TargetKind.MODULE
    return None if package_of(text) is None else TargetKind.NAME


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


def declared_reward_range(target: Target | None) -> tuple[float, float] | None:
    """Return the range of rewards that a target's manifest declares; None without a target or a valid one."""
    if target is None:
        return None
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
    folder = importable_target(text).folder
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

    details = DockerEngine.find().find_image(image)
    if details is None:
        raise ImageNotFoundError(f"the local engine has no image {image!r}; `ropewalk build PATH` makes one")
    exposed = (details.get("Config") or {}).get("ExposedPorts") or {}
    ports = [int(entry.removesuffix("/tcp")) for entry in exposed if entry.endswith("/tcp")]
    return ports[0] if len(ports) == 1 else PORT


def is_environment_folder(folder: Path) -> bool:
    """Whether a folder has a manifest or a `server/app.py`."""
    return (folder / MANIFEST).is_file() or (folder / "server" / "app.py").is_file()


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


def environment_packages() -> list[str]:
    """Return the packages of all environments that have a name, without importing them."""
    from importlib.metadata import distributions  # slow to import, and rarely needed

    envs = _find_spec(ENVS)
    folders = (envs and envs.submodule_search_locations) or ()
    modules = pkgutil.iter_modules([*folders, str(Path.cwd()), *sys.path])
    names = {module.name for module in modules if module.ispkg and module.name.endswith(_SUFFIX)}
    # The packages of an editable install are on no path: its distribution tells the name.
    named = (_DISTRIBUTION.fullmatch(each.name or "") for each in distributions())
    names |= {match["name"] for match in named if match is not None}
    return sorted({package for name in names if (package := package_of(name)) is not None})


def environment_names() -> list[str]:
    """Return the names of all environments, without importing them."""
    return list(map(name_of_package, environment_packages()))


def name_of_package(package: str) -> str:
    """Return the name of an environment, by its package."""
    return package.rpartition(".")[2].removesuffix(_SUFFIX)


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


def require_package(name: str) -> str:
    """Return the package of an environment's name.

    Raises:
        ConfigurationError: There is no such environment; with the names that are similar.
    """
    package = package_of(name)
    if package is None:
        raise ConfigurationError(
            f"expected the name of an environment, got {name!r}; {_names_hint(name)} {FORMS}"
        )
    return package


def folder_of(package: str) -> Path | None:
    """Return the folder of an environment's package, ours if we have one of its name; None if there is none."""
    return own_folder(package) or find_module(package)


def _near_names(text: str) -> list[str]:
    """Return the names of environments that a text resembles; none for a text with a tag, folder or registry."""
    if not _BARE_NAME.fullmatch(text):
        return []
    short = text.lower().replace("-", "_").removesuffix(_SUFFIX)
    return difflib.get_close_matches(short, environment_names(), n=3, cutoff=0.75)


def _near_path(path: Path) -> str | None:
    """Return a hint with the entries of a path's folder that its name resembles, if any."""
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=3)
    return f"did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else None


def _names_hint(text: str) -> str:
    if near := _near_names(text):
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"there are: {', '.join(environment_names()) or 'none'}."


def _missing_image(image: str) -> str:
    """Return why the local engine cannot run an image; "" if it has the image."""
    from openenv_core.providers.docker.engine import DockerEngine

    try:
        engine = DockerEngine.find()
        engine.ping()
        return "" if engine.has_image(image) else "the Docker engine has no such image"
    except EngineUnavailableError:
        return "no Docker engine answers"
    except OpenEnvError as error:
        return str(error)


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
