"""The released factories that find a client or an action class by an environment's name; they install nothing."""

import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import packages_distributions, version
from typing import Any

from openenv_core.client import EnvClient, GenericAction, GenericEnvClient
from openenv_core.client.settings import space_label
from openenv_core.client.tools import MCPToolClient
from openenv_core.errors import ConfigurationError
from openenv_core.making import client_class, make
from openenv_core.manifest import ManifestError, read_keys
from openenv_core.targets import environment_packages, folder_of, require_package
from openenv_core.tools import CallToolAction
from openenv_core.types import Action

_SPACE = re.compile(r"(?:https://(?:huggingface\.co|hf\.co)/spaces/)?(?P<id>[\w.-]+/[\w.-]+)/?")


_distributions = cache(packages_distributions)  # reads the records of all that is installed


def _describe(name: str) -> dict[str, Any]:
    """Return what an environment's manifest and distribution say, without importing its code."""
    package = require_package(name)
    folder = folder_of(package)
    assert folder is not None
    try:
        keys = read_keys(folder)
    except ManifestError:  # a listing shows broken environments too
        keys = {}
    distribution = next(iter(_distributions().get(package.partition(".")[0], ())), None)
    key = package.rpartition(".")[2].removesuffix("_env")
    return {
        "env_key": key,
        "name": str(keys.get("name") or f"{key}_env"),
        "package": distribution or package,
        "version": str(keys.get("version") or (version(distribution) if distribution else "unknown")),
        "description": " ".join(str(keys.get("description") or "").split()),
        "default_image": f"{key}-env:latest".replace("_", "-"),
        "spec_version": keys.get("spec_version"),
    }


def _describe_classes(name: str) -> dict[str, Any]:
    """Return the names of an environment's classes, whose package is imported; None for a class that it lacks."""
    client = client_class(name)
    return {
        "env_class": client.__name__,
        "action_class": getattr(_action_type(client), "__name__", None),
        "observation_class": getattr(getattr(client, "observation_type", None), "__name__", None),
        "module": client.__module__,
    }


def _action_type(client: type[EnvClient[Any, Any, Any]]) -> type[Action] | None:
    """Return the action class of a client, that of calls for a client of tools; None if it has none."""
    return getattr(client, "action_type", None) or (
        CallToolAction if issubclass(client, MCPToolClient) else None
    )


def _print_all(what: str, about: Callable[[dict[str, Any]], str]) -> None:
    """Print one line about each environment, sorted by name."""
    described = [_describe(package.rpartition(".")[2]) for package in environment_packages()]
    described.sort(key=lambda each: str(each["env_key"]))
    lines = [f"  {environment['env_key']:<20} {about(environment)}" for environment in described]
    sys.stdout.write("\n".join([f"Available {what}:", *lines, f"Total: {len(lines)}", ""]))


class AutoEnv:
    """Makes a client for an environment's name, or for the server of a Space by the Space's id."""

    def __init__(self) -> None:
        """Refuse: the class has class methods only."""
        raise TypeError(
            f"{type(self).__name__} makes other objects; call {type(self).__name__}.from_env(name)"
        )

    @classmethod
    def from_env(
        cls,
        name: str,
        base_url: str | None = None,
        docker_image: str | None = None,
        container_provider: Any = None,
        wait_timeout: float = 30.0,
        env_vars: dict[str, str] | None = None,
        trust_remote_code: bool = False,
        skip_install: bool = False,
        **options: Any,
    ) -> EnvClient[Any, Any, Any]:
        """Return a client of the environment's class, whose methods wait where no event loop runs.

        Args:
            name: An installed environment, or the `owner/name` or URL of a Space.
            base_url: The URL of its server, if that is already running.
            docker_image: Its image, to run it in a container.
            container_provider: Starts the container.
            wait_timeout: Seconds within which the server must be healthy.
            env_vars: Environment variables of the server, if one is started.
            trust_remote_code: Ignored, since no code is fetched.
            skip_install: Whether to return a client with dicts, so that the environment's package is not needed.
            options: Arguments of the client's constructor.

        Raises:
            ConfigurationError: There is no environment of that name.
        """
        space = _SPACE.fullmatch(name)
        if space is not None:
            base_url = base_url or f"https://{space_label(space['id'])}.hf.space"
        client = GenericEnvClient if skip_install or space is not None else client_class(name)
        if docker_image is not None or base_url is None:  # a server starts
            options |= {"env_vars": env_vars or {}, "start_timeout_s": wait_timeout}
        if docker_image is not None:
            return client.from_docker_image(docker_image, provider=container_provider, **options).async_client
        return make(base_url or name, client=client, **options).async_client

    from_hub = from_env

    @classmethod
    def get_env_class(cls, name: str) -> type[EnvClient[Any, Any, Any]]:
        """Return the client class of an installed environment."""
        return client_class(name)

    @classmethod
    def get_env_info(cls, name: str) -> dict[str, Any]:
        """Return what is known of an installed environment, whose package is imported.

        The keys are `env_key`, `name`, `package`, `version`, `description`, `env_class`, `action_class`,
        `observation_class`, `module`, `default_image` and `spec_version`. A class that the client does not name is
        None.

        Raises:
            ConfigurationError: There is no environment of that name.
        """
        return {**_describe(name), **_describe_classes(name)}

    @classmethod
    def list_environments(cls) -> None:
        """Print the installed environments, without importing them."""
        _print_all(
            "environments", lambda each: f"{each['description']} ({each['package']} {each['version']})"
        )


class AutoAction:
    """Finds the action class of an environment by the environment's name."""

    __init__ = AutoEnv.__init__

    @classmethod
    def from_env(cls, name: str, skip_install: bool = False) -> type[Action] | type[GenericAction]:
        """Return the action class of an installed environment; `GenericAction` for a Space.

        Args:
            name: An installed environment, or the `owner/name` or URL of a Space.
            skip_install: Whether to return `GenericAction`, so that the environment's package is not needed.

        Raises:
            ConfigurationError: There is no environment of that name, or its client has no action class.
        """
        if skip_install or _SPACE.fullmatch(name):
            return GenericAction
        client = client_class(name)
        if (action_type := _action_type(client)) is None:
            raise ConfigurationError(f"expected an action_type of {client.__name__}; set it on the class")
        return action_type

    @classmethod
    def from_hub(cls, env_name: str, skip_install: bool = False) -> type[Action] | type[GenericAction]:
        """Return the action class of an environment; see `from_env`."""
        return cls.from_env(env_name, skip_install)

    @classmethod
    def get_action_info(cls, name: str) -> dict[str, Any]:
        """Return what is known of an installed environment's classes; see `AutoEnv.get_env_info`.

        The keys are `env_key`, `env_name`, `package`, `action_class`, `observation_class` and `module`.

        Raises:
            ConfigurationError: There is no environment of that name.
        """
        info = AutoEnv.get_env_info(name)
        keys = ("env_key", "package", "action_class", "observation_class", "module")
        return {"env_name": info["name"], **{key: info[key] for key in keys}}

    @classmethod
    def list_actions(cls) -> None:
        """Print the action classes of the installed environments, which are imported."""

        def action(environment: dict[str, Any]) -> str:
            try:
                name = _describe_classes(environment["env_key"])["action_class"]
            except Exception as error:  # raised by the author's code
                return f"cannot be imported: {type(error).__name__}: {error}"
            return f"{name} ({environment['package']})"

        _print_all("action classes", action)
