"""`make`: a client for an environment given by name, path, URL or image, like `gymnasium.make`."""

from collections.abc import Sequence
from typing import Any

from openenv_core.client import EnvClient, GenericEnvClient, SyncEnvClient
from openenv_core.client.settings import named_parameters
from openenv_core.client.tools import MCPToolClient
from openenv_core.errors import ConfigurationError
from openenv_core.lifecycle import models_of
from openenv_core.multi_agent import MultiAgentEnvironment
from openenv_core.one_file import import_file, read_file
from openenv_core.packages import import_ours
from openenv_core.targets import TargetKind, require_package, split_path, target_of
from openenv_core.types import State


def make(
    target: str | Sequence[str],
    *,
    client: type[EnvClient[Any, Any, Any]] | None = None,
    fleet: str | None = None,
    servers: int | None = None,
    **options: Any,
) -> SyncEnvClient[Any, Any, Any]:
    """Return a client of an environment. A server, if needed, starts at the first use and stops with the client.

        with make("blackjack") as env:
            result = env.reset(seed=1)

        with make("blackjack", fleet="ray", servers=8) as env:
            others = [env.new_session() for _ in range(100)]

    `await` the client, or use it with `async with`, to get the async one.

    Args:
        target: An environment's name, a folder or Python file, `module:attribute`, one or more URLs (see
            `EnvClient`), or `docker://IMAGE`; an image that is on this machine needs no `docker://` if nothing else
            has its name.
        client: The client's class. Default: the environment's own if `target` is a name, one with the models of the
            class if it is a file with an environment's class, otherwise `GenericEnvClient`, whose actions and
            observations are dicts.
        fleet: The engine of the servers: `ray`, whose nodes have the target, or `docker` or `kubernetes`, where it is
            an image.
        servers: The number of the fleet's servers; 1 by default.
        options: Arguments of the client's constructor, and of `from_process`, `from_docker_image` or the fleet's class
            (`openenv_core.providers.RayFleet` etc.) if servers are started.

    Raises:
        ConfigurationError: The target is none of these, or an option does not exist.
    """
    if (fleet is None and servers is not None) or (fleet is not None and not isinstance(target, str)):
        raise ConfigurationError("expected servers=N with fleet=ENGINE, and one target, not URLs")
    if not isinstance(target, str):
        return (client or GenericEnvClient)(target, **options).sync()
    if fleet is not None and fleet != "ray":
        return _client_of_fleet(client or GenericEnvClient, fleet, target, servers or 1, options)
    resolved = target_of(target)
    if resolved.kind is TargetKind.NAME:
        client = client or client_class(target)
    elif client is None and resolved.kind is TargetKind.PATH:
        client = client_of_file(resolved.text)
    client = client or GenericEnvClient
    if fleet is not None:
        return _client_of_fleet(client, fleet, resolved.text, servers or 1, options)
    if resolved.kind is TargetKind.URL:
        return client(resolved.text, **options).sync()
    if resolved.kind is TargetKind.IMAGE:
        return client.from_docker_image(resolved.text, **options)
    return client.from_process(resolved.text, **options)


def _client_of_fleet(
    client: type[EnvClient[Any, Any, Any]], engine: str, target: str, servers: int, options: dict[str, Any]
) -> SyncEnvClient[Any, Any, Any]:
    from openenv_core.providers.fleet import open_fleet

    known = named_parameters(client) | named_parameters(EnvClient)
    mine = {name: options.pop(name) for name in known & options.keys()}
    fleet = open_fleet(engine, target.removeprefix("docker://"), servers, options)
    return client(provider=fleet, **{"token": fleet.token, **mine}).sync()


def client_class(name: str) -> type[EnvClient[Any, Any, Any]]:
    """Return the client class of an environment's package.

    Raises:
        ConfigurationError: There is no environment of that name, or its package has no client class.
    """
    package = require_package(name)
    module = import_ours(package)
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, EnvClient) and value.__module__.startswith(package):
            return value
    raise ConfigurationError(f"expected a subclass of EnvClient in {package}; import it in its __init__.py")


def client_of_file(target: str) -> type[EnvClient[Any, Any, Any]] | None:
    """Return a client class with the models of an environment's class in a file; None if the target is no such file.

    Args:
        target: `FILE.py:CLASS`.
    """
    path, name = split_path(target)
    if path.suffix != ".py" or name not in read_file(path).classes:
        return None
    models = models_of(cls := getattr(import_file(path), name))
    if hasattr(cls, "TOOLSET"):
        return MCPToolClient
    # The state of a seat is the server's, not the game's.
    state = State if issubclass(cls, MultiAgentEnvironment) else models.state
    types = {"action_type": models.action, "observation_type": models.observation, "state_type": state}
    return type(f"{name}Client", (EnvClient,), {**types, "__doc__": cls.__doc__})
