"""What `EnvClient.from_docker_image` is given, sorted: the container's options, and the client's."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from openenv_core.errors import ConfigurationError
from openenv_core.providers.base import AnyProvider
from openenv_core.providers.docker.provider import LocalDockerProvider
from openenv_core.providers.released import Released


def provider_for(
    image: str, given: AnyProvider | None, options: Mapping[str, Any], client_options: Iterable[str]
) -> tuple[AnyProvider, dict[str, Any]]:
    """Return what starts the image, and the options that are the client's.

    Raises:
        ConfigurationError: There is no such option, or the given provider starts no images.
    """
    known = set(client_options)
    of_client = {name: value for name, value in options.items() if name in known}
    of_container = {name: value for name, value in options.items() if name not in known}
    if given is None:
        return LocalDockerProvider(image, **of_container), of_client
    for name in ("start_container", "wait_for_ready", "stop_container"):
        if not callable(getattr(given, name, None)):
            raise ConfigurationError(
                f"expected a provider with start_container(image), wait_for_ready(base_url) and stop_container(), "
                f"got {type(given).__name__} without {name}; a provider that knows its image goes to the client: "
                "EnvClient(provider=...)"
            )
    provider: Any = given
    start = partial(provider.start_container, image, **of_container)
    return Released(start, provider.wait_for_ready, provider.stop_container), of_client
