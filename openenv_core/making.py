"""`make`: a client for an environment given by name, path, URL or image, like `gymnasium.make`."""

from collections.abc import Sequence
from typing import Any

from openenv_core.client import EnvClient, GenericEnvClient, SyncEnvClient
from openenv_core.errors import ConfigurationError
from openenv_core.packages import import_ours
from openenv_core.targets import TargetKind, require_package, target_of


def make(
    target: str | Sequence[str], *, client: type[EnvClient[Any, Any, Any]] | None = None, **options: Any
) -> SyncEnvClient[Any, Any, Any]:
    """Return a client of an environment. A server, if needed, starts at the first use and stops with the client.

        with make("blackjack") as env:
            result = env.reset(seed=1)

    `await` the client, or use it with `async with`, to get the async one.

    Args:
        target: An environment's name, a folder, `module:attribute`, one or more URLs (see `EnvClient`), or
            `docker://IMAGE`; an image that is on this machine needs no `docker://` if nothing else has its name.
        client: The client's class. Default: the environment's own if `target` is a name, otherwise
            `GenericEnvClient`, whose actions and observations are dicts.
        options: Arguments of the client's constructor, and of `from_process` or `from_docker_image` if a server is
            started.

    Raises:
        ConfigurationError: The target is none of these, or an option does not exist.
    """
    if not isinstance(target, str):
        return (client or GenericEnvClient)(target, **options).sync()
    resolved = target_of(target)
    if resolved.kind is TargetKind.NAME:
        client = client or client_class(target)
    client = client or GenericEnvClient
    if resolved.kind is TargetKind.URL:
        return client(resolved.text, **options).sync()
    if resolved.kind is TargetKind.IMAGE:
        return client.from_docker_image(resolved.text, **options)
    return client.from_process(resolved.text, **options)


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
