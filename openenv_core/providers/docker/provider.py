"""A server in a container, for a client."""

import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from openenv_core.errors import ConfigurationError, EngineUnavailableError, ProviderError
from openenv_core.providers.adapt import Released
from openenv_core.providers.base import AnyProvider, OwnedServerProvider
from openenv_core.providers.docker.container import Container, start_container
from openenv_core.providers.docker.options import ContainerOptions, options_with


class LocalDockerProvider(OwnedServerProvider):
    """Runs an image, on a free port of the loopback interface.

    The container has no capabilities, a read-only root and a bounded number of processes, unless told
    otherwise by name. It ends with this process, whatever that dies of: a companion process removes it.

    Args:
        image: Name or id of the image. It is not pulled.
        options: What the container gets.
        fields: Fields of `ContainerOptions`, in place of those of `options`.

    Raises:
        ConfigurationError: There is no such option, or a value that no engine could honour. `start` raises
            EngineUnavailableError where no engine answers, ImageNotFoundError where it has no such image,
            OptionUnavailableError where it cannot honour an option; `stop` EngineUnavailableError: call it again.
    """

    death_s = 3.0
    """How long, in seconds, an engine that is busy may take to tell that a container has ended."""

    def __init__(self, image: str, *, options: ContainerOptions | None = None, **fields: Any) -> None:
        super().__init__()
        self.image = image
        self.options = options_with(options, fields)
        self._stopping = threading.Event()
        self._container: Container | None = None

    @property
    def container(self) -> Container | None:
        """The container; None while there is none."""
        return self._container

    @property
    def alive(self) -> bool:
        """Whether the container runs; False before the start, and once it has ended by itself."""
        container = self._container
        if container is None:
            return False
        try:
            return container.alive()
        except EngineUnavailableError:
            return True  # nobody knows; the container may outlive its engine

    def output(self) -> str:
        """Return the last of what the container printed, and how it ended; empty before the start."""
        container = self._container
        if container is None:
            return ""
        try:
            state, text = container.end_state(), container.logs()
        except ProviderError as error:
            return f"[{error}]"
        return text if state.running else f"{text.rstrip()}\n[the container {state}]".lstrip()

    def _launch(self) -> str:
        self._stopping.clear()
        self._container = start_container(self.image, self.options, stopping=self._stopping)
        return self._container.url

    def _interrupt(self) -> None:
        self._stopping.set()

    def _stop(self) -> None:
        if self._container is not None:
            self._container.remove(self.options.stop_timeout_s)
            self._container = None
        self._url = None


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
