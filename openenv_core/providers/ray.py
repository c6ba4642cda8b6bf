"""Fleets of environment servers on Ray: each is an actor, which keeps its server's process."""

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from openenv_core.errors import ProviderError, installed_with
from openenv_core.providers.base import TOKENS
from openenv_core.providers.fleet import READY_TIMEOUT_S, FleetServer, ServerFleet
from openenv_core.providers.process import LocalProcessProvider

with installed_with("ray", "Ray", "ray"):
    import ray  # type: ignore[import-not-found,unused-ignore]  # for those who check their own file, without Ray
    from ray.util import list_named_actors  # type: ignore[import-not-found,unused-ignore]

NAMESPACE: Final = "ropewalk"
"""Ray's namespace of the actors, whose names are those of the servers."""

DRAIN_TIMEOUT_S: Final = 20.0
"""Seconds that a server has to end: its own drain, and a margin."""

STATUS_TIMEOUT_S: Final = 5.0
WATCH_INTERVAL_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RayServerOptions:
    """What an actor serves, and what it needs.

    Attributes:
        app: What is served, as for `ropewalk serve`, on the actor's node.
        token: Bearer token of the server.
        env_vars: Environment variables of the server.
        num_cpus: CPUs that Ray reserves.
        memory: Bytes of memory that Ray reserves; None for no reservation.
        max_restarts: How often Ray restarts it; -1 for always.
        placement: Ray's scheduling strategy: `SPREAD`, `DEFAULT`, or an object of `ray.util.scheduling_strategies`.
        detached: Whether it outlives the program that started it.
        start_timeout_s: Seconds within which its server must be healthy.
    """

    app: str
    token: str = field(repr=False)
    env_vars: Mapping[str, str] = field(default_factory=dict, repr=False)
    num_cpus: float = 1.0
    memory: int | None = None
    max_restarts: int = -1
    placement: Any = "SPREAD"
    detached: bool = False
    start_timeout_s: float = 60.0


class _RayServer:
    """The actor. Its process ends when its server does, so that Ray restarts it.

    Args:
        options: What it serves.
    """

    def __init__(self, options: RayServerOptions) -> None:
        self._options = options
        self._provider: LocalProcessProvider | None = None
        try:
            self._serve(port=0)
        except ProviderError:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                os._exit(1)  # Ray tries again, which it does not after an exception
            raise
        threading.Thread(target=self._watch, name="ropewalk-watch", daemon=True).start()

    def options(self) -> RayServerOptions:
        """Return what it serves."""
        return self._options

    def url(self) -> str | None:
        """Return the server's URL; None while it is being replaced."""
        return None if self._provider is None else self._provider.url

    def cordon(self) -> None:
        """Have the server refuse new sessions."""
        if (provider := self._provider) is not None:
            provider.cordon()

    def restart(self) -> None:
        """Drain the server and start it anew at its port. If it does not start, Ray restarts the actor."""
        provider, self._provider = self._provider, None
        if provider is None:
            return  # it is being replaced
        port = int(str(provider.url).rpartition(":")[2])
        provider.stop()
        try:
            self._serve(port)
        except ProviderError:
            os._exit(1)

    def _serve(self, port: int) -> None:
        options, host = self._options, ray.util.get_node_ip_address()
        provider = LocalProcessProvider(
            options.app,
            env_vars={**options.env_vars, TOKENS: options.token},
            start_timeout_s=options.start_timeout_s,
            stop_timeout_s=DRAIN_TIMEOUT_S,
            host=host,
            port=port,
        )
        provider.start()
        self._provider = provider

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_INTERVAL_S)
            if (provider := self._provider) is not None and not provider.alive:
                os._exit(1)


class RayFleet(ServerFleet):
    """A fleet on a Ray cluster. Needs the extra `ray`, on the nodes too, and there what the environment needs.

    Ray restarts an actor whose process, server or node dies, on any node; the server then has another URL. Unless
    `detached`, Ray ends the actors with this program, however it ends.

    Args:
        app: What is served, as for `ropewalk serve`, on the nodes.
        servers: Number of servers.
        name: Name of the fleet; by default a random one.
        token: Bearer token of the servers; by default a random one.
        options: Fields of `RayServerOptions`; `find` finds the servers of a fleet that is `detached`.

    Raises:
        ConfigurationError: An argument is invalid, or Ray is not installed.
        ProviderError: There is no cluster at RAY_ADDRESS. Without that variable, and without a cluster on this machine,
            Ray starts a local one, which ends with this program.
    """

    def __init__(
        self,
        app: str,
        servers: int,
        *,
        name: str | None = None,
        token: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(servers, name, token)
        self._options = RayServerOptions(app=app, token=self.token, **options)
        self._handles: dict[str, Any] = {}  # without a handle Ray ends an actor that is not detached
        _connect(detached=self._options.detached)

    @classmethod
    def find(cls, name: str) -> Self:
        """Return a running fleet."""
        _connect(detached=True)
        if not (actors := _actors(name)):
            raise ProviderError(f"expected a fleet {name!r} on the Ray cluster, got none")
        with _translated_errors():
            first = next(iter(actors.values()))
            options: RayServerOptions = ray.get(first.options.remote(), timeout=READY_TIMEOUT_S)
        arguments = {each.name: getattr(options, each.name) for each in fields(options)}
        return cls(servers=len(actors), name=name, **arguments)._adopt()

    def servers(self) -> list[FleetServer]:
        """Return the servers; one whose actor is being started or restarted is not ready."""
        with _translated_errors():
            urls = {name: actor.url.remote() for name, actor in _actors(self.name).items()}
            ready, _ = ray.wait(list(urls.values()), num_returns=len(urls), timeout=STATUS_TIMEOUT_S)
        found = []
        for name, pending in urls.items():
            url = None
            if pending in ready:
                with suppress(ray.exceptions.RayError):  # its actor is dead, or about to be restarted
                    url = ray.get(pending)
            found.append(FleetServer(name, url, url is not None))
        return sorted(found, key=lambda server: server.number)

    def _end(self) -> None:
        """End the actors, and so their servers, which drain."""
        self._remove(0)

    def wait_ready(self, servers: int, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until this many servers are ready; raise ProviderError at once if one could not start."""
        calls = [handle.url.remote() for handle in self._handles.values()]

        def have_started() -> bool:
            nonlocal calls
            ready, calls = ray.wait(calls, num_returns=len(calls), timeout=0) if calls else ([], [])
            for call in ready:
                with suppress(ray.exceptions.ActorUnavailableError):  # it is being restarted
                    ray.get(call)
            return not calls

        with _translated_errors():
            self._wait(have_started, timeout_s, f"{servers} servers to start")
        super().wait_ready(servers, timeout_s)

    def replace(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Drain a server, and start it anew at the same URL; at another if its actor dies meanwhile."""
        actor = _actors(self.name).get(self._find(name).name)
        with _translated_errors(), suppress(ray.exceptions.ActorUnavailableError):
            if actor is not None:
                ray.get(actor.restart.remote(), timeout=timeout_s)
        self._wait(lambda: self._find(name).ready, timeout_s, f"{name} to be ready")

    def _resize(self, servers: int) -> None:
        self._remove(servers)
        options, known = self._options, _actors(self.name)
        for number in range(servers):
            if (name := f"{self.name}-{number}") in known:
                continue
            actor = ray.remote(_RayServer).options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached" if options.detached else None,
                num_cpus=options.num_cpus,
                memory=options.memory,
                max_restarts=options.max_restarts,
                scheduling_strategy=options.placement,
                max_concurrency=4,
            )
            self._handles[name] = actor.remote(options)

    def _remove(self, first: int) -> None:
        for name, actor in _actors(self.name).items():
            if int(name.rpartition("-")[2]) >= first:
                with _translated_errors():
                    ray.kill(actor)
                self._handles.pop(name, None)

    def _cordon(self, server: FleetServer) -> None:
        with _translated_errors():
            if (actor := _actors(self.name).get(server.name)) is not None:
                ray.get(actor.cordon.remote(), timeout=STATUS_TIMEOUT_S)


def _connect(*, detached: bool) -> None:
    """Connect to the cluster. Servers that are to outlive this program need one that does, too."""
    if not ray.is_initialized():
        with _translated_errors():
            ray.init("auto" if detached else None, namespace=NAMESPACE, log_to_driver=False)


def _actors(fleet: str) -> dict[str, Any]:
    """Return a fleet's actors by name, those that are being restarted included."""
    found = {}
    with _translated_errors():
        for each in list_named_actors(all_namespaces=True):
            name = str(each["name"])
            if each["namespace"] == NAMESPACE and re.fullmatch(rf"{re.escape(fleet)}-\d+", name):
                with suppress(ValueError):  # it has ended meanwhile
                    found[name] = ray.get_actor(name, NAMESPACE)
    return found


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Convert Ray's exceptions in the block to ProviderError."""
    try:
        yield
    except ProviderError:
        raise
    except (ray.exceptions.RayError, ConnectionError, ValueError, RuntimeError) as error:
        raise ProviderError(
            f"expected the Ray cluster to do it, got {type(error).__name__}: {error}"
        ) from error
