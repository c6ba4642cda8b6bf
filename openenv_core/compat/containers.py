"""The released package's provider interfaces, implemented with our providers."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from openenv_core.errors import ConfigurationError
from openenv_core.providers.base import wait_healthy
from openenv_core.providers.docker.container import LocalDockerProvider as Ours
from openenv_core.providers.fleet import ServerFleet, open_fleet
from openenv_core.providers.remote import healthy


class ContainerProvider(ABC):
    """Starts a container of a given image. `EnvClient.from_docker_image` accepts it as `provider`."""

    @abstractmethod
    def start_container(
        self, image: str, port: int | None = None, env_vars: Mapping[str, str] | None = None, **kwargs: Any
    ) -> str:
        """Start a container and return its URL."""

    @abstractmethod
    def stop_container(self) -> None:
        """Stop the container."""

    @abstractmethod
    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        """Return when the server is healthy."""

    def close(self) -> None:  # noqa: B027 - overridden where there is something to release
        """Release what the provider holds besides the container, such as a service's client; by default nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RuntimeProvider(ABC):
    """Starts one particular server. A client accepts it as `provider`."""

    @abstractmethod
    def start(
        self,
        port: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        workers: int = 1,
        **kwargs: Any,
    ) -> str:
        """Start the server and return its URL."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the server."""

    @abstractmethod
    def wait_for_ready(self, timeout_s: float = 30.0) -> None:
        """Return when the server is healthy."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _AdaptedProvider(ContainerProvider):
    """Starts one container, or pod, by a provider of ours."""

    _provider: Any = None

    @abstractmethod
    def _make(self, image: str, port: int | None, env_vars: Mapping[str, str] | None, options: Any) -> Any:
        """Return the provider of a container that is not started yet."""

    def start_container(
        self, image: str, port: int | None = None, env_vars: Mapping[str, str] | None = None, **kwargs: Any
    ) -> str:
        """Start a container, wait until its server is healthy, and return its URL.

        Args:
            image: Name or id of the image.
            port: Port of this machine to publish it on; any free port by default. That of a pod is always 8000.
            env_vars: Environment variables.
            kwargs: Fields of `ContainerOptions`, where `command` may be a single string; or arguments of
                `KubernetesFleet`.

        Raises:
            ProviderError: The container could not be started.
            ConfigurationError: An option does not exist, or a container is already running.
        """
        if self._provider is not None:
            raise ConfigurationError(
                "the provider has started a container already; call stop_container() first"
            )
        provider = self._make(image, port, env_vars, kwargs)
        url = str(provider.start())
        self._provider = provider
        return url

    def stop_container(self) -> None:
        """Stop and remove the container."""
        provider, self._provider = self._provider, None
        if provider is not None:
            provider.stop()


class LocalDockerProvider(_AdaptedProvider):
    """The released provider's interface to ours: hardened containers, on loopback only; no argument is ignored."""

    def _make(self, image: str, port: int | None, env_vars: Mapping[str, str] | None, options: Any) -> Ours:
        if isinstance(command := options.get("command"), str):
            options["command"] = shlex.split(command)
        return Ours(image, host_port=port, env_vars=dict(env_vars or {}), **options)

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        """Return when the server is healthy, as it already was when `start_container` returned.

        Raises:
            ServerStartError: It is not healthy within `timeout_s`.
        """
        provider = self._provider  # another thread may stop it meanwhile
        if provider is None or base_url != provider.url:
            raise ConfigurationError(
                f"expected the URL that start_container() returned, got {base_url!r}; start the container first"
            )
        wait_healthy(base_url, partial(healthy, base_url), timeout_s, output=provider.output)


class KubernetesProvider(_AdaptedProvider):
    """The released provider's name and interface, which has no implementation there: a fleet of one pod.

    Args:
        options: Arguments of `KubernetesFleet`, such as `token`, which the client then needs too.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    def _make(
        self, image: str, port: int | None, env_vars: Mapping[str, str] | None, options: Any
    ) -> ServerFleet:
        if port not in (None, 8000):
            raise ConfigurationError(f"expected port 8000 of a pod, got {port}; leave it out")
        return open_fleet("kubernetes", image, 1, {**self._options, "env_vars": env_vars, **options})

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        """Return when the server is ready, as it already was when `start_container` returned."""
        if self._provider is not None:
            self._provider.wait_ready(1, timeout_s)
