"""Fleets of equal environment servers on an engine: Ray, Docker or Kubernetes."""

import json
import logging
import re
import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, Final, Self

from openenv_core.errors import ConfigurationError, ProviderError
from openenv_core.providers.base import OwnedServerProvider
from openenv_core.proxies import client_for

logger = logging.getLogger("openenv_core")

ENGINES: Final[Mapping[str, str]] = {
    "ray": "openenv_core.providers.ray:RayFleet",
    "docker": "openenv_core.providers.docker.fleet:DockerFleet",
    "kubernetes": "openenv_core.providers.kubernetes:KubernetesFleet",
    "agent-sandbox": "openenv_core.providers.claims:ClaimFleet",
}

READY_TIMEOUT_S: Final = 300.0
"""Default deadline for new servers to be ready: a node may have to pull an image first."""

IDLE_TIMEOUT_S: Final = 3600.0
"""Default deadline for the sessions of a server that is to leave."""

POLL_INTERVAL_S: Final = 0.5
REQUEST_TIMEOUT_S: Final = 5.0

_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class FleetServer:
    """One server of a fleet.

    Attributes:
        name: `FLEET-NUMBER`, where numbers count from 0.
        url: Its URL; None while it has none.
        ready: Whether the engine knows it to be healthy.
    """

    name: str
    url: str | None
    ready: bool

    @property
    def number(self) -> int:
        """The number in its name."""
        return int(self.name.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class Load:
    """The sessions of one or several servers, as GET /capacity reports them.

    Attributes:
        slots: The most sessions that they can have.
        in_use: Their sessions.
        waiting: The clients that wait for one.
    """

    slots: int
    in_use: int
    waiting: int


class ServerFleet(OwnedServerProvider):
    """Equal servers of one environment; an engine restarts those that die.

    A fleet is a provider: a client that gets it as `provider` starts it, has the URLs of all its servers, and stops it
    when it is closed. The subclasses do what differs between engines.

        with RayFleet("blackjack", 8) as fleet:
            env = BlackjackEnv(fleet.urls(), token=fleet.token)

    Args:
        servers: Number of servers that `start` starts.
        name: Name of the fleet on its engine: lower-case letters, digits and dashes. By default a random one.
        token: Bearer token of the servers; by default a random one.

    Attributes:
        name: Name of the fleet.
        token: Bearer token of the servers.

    Raises:
        ConfigurationError: An argument is invalid, or the engine's package is not installed.
    """

    def __init__(self, servers: int, name: str | None, token: str | None) -> None:
        super().__init__()
        if servers < 1:
            raise ConfigurationError(f"expected at least 1 server, got {servers}")
        self.name = name or f"env-{secrets.token_hex(4)}"
        if not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"expected a fleet's name of 1 to 40 lower-case letters, digits and dashes, got {self.name!r}"
            )
        self.token = token or secrets.token_urlsafe(32)
        self._size = servers
        self._is_own = False  # started by this object, or found
        self._stopping = threading.Event()
        self._draining: FleetServer | None = None  # by `autoscale`, until it is idle

    @classmethod
    @abstractmethod
    def find(cls, name: str) -> Self:
        """Return the running fleet of a name, which outlives this object; as `_adopt` returns it.

        Raises:
            ProviderError: There is none, or the engine does not answer.
        """

    @abstractmethod
    def servers(self) -> list[FleetServer]:
        """Return the servers that there are, by number. Raises ProviderError if the engine does not answer."""

    @abstractmethod
    def replace(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Drain a server, and start it anew, from the current code or image, at the same URL if possible.

        The episodes of deterministic environments continue on other servers; those of others are lost.

        Raises:
            ProviderError: There is no such server, or it was not ready in time.
        """

    @abstractmethod
    def _end(self) -> None:
        """Stop all servers. Idempotent."""

    @abstractmethod
    def _resize(self, servers: int) -> None:
        """Start servers up to this number, or stop those from this number on; does not wait."""

    @abstractmethod
    def _cordon(self, server: FleetServer) -> None:
        """Have a server refuse new sessions."""

    def _uncordon(self, server: FleetServer) -> None:
        """Have a server without sessions accept new ones again, by starting it anew."""
        self.replace(server.name)

    def start(self) -> str:
        """Start the servers, wait until all are ready, and return the URL of one; a second call returns one, too.

        Raises:
            ProviderError: They were not ready in time, `stop` was called meanwhile, or there is a fleet of this name.
        """
        super().start()
        self.wait_ready(1)
        return self.urls()[0]

    def _launch(self) -> str:
        self._stopping.clear()
        self._is_own = False  # a start that is refused ends nothing
        if self.servers():
            raise ProviderError(f"there is a fleet {self.name!r} already; scale it, or end it first")
        self._is_own = True
        self._resize(self._size)
        self.wait_ready(self._size)
        return self.urls()[0]

    def _interrupt(self) -> None:
        self._stopping.set()

    def _stop(self) -> None:
        """Stop all servers, whatever their sessions do, unless this object has neither started nor found them."""
        if self._is_own:
            self._end()
        self._is_own, self.url = False, None

    def _adopt(self) -> Self:
        """Take the running fleet of this name for one's own, which `stop` ends; return this object."""
        self._is_own = True
        return self

    def urls(self) -> list[str]:
        """Return the URLs of the servers that are ready."""
        return [server.url for server in self.servers() if server.ready and server.url is not None]

    def wait_ready(self, servers: int, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until this many servers are ready.

        Raises:
            ProviderError: They were not in time.
        """
        self._wait(
            lambda: len(self.urls()) >= servers,
            timeout_s,
            f"{servers} servers to be ready; the engine tells why one is not, or give it more time",
        )

    def scale(
        self,
        servers: int,
        *,
        ready_timeout_s: float = READY_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """Add servers, or remove those with the highest numbers, without ending a session.

        A server that is to leave refuses new sessions, and is stopped once it has none.

        Raises:
            ProviderError: New servers were not ready in time, or there are sessions left; the servers that have them
                stay, and refuse new ones. Call it again to go on.
        """
        if servers < 1:
            raise ConfigurationError(f"expected at least 1 server, got {servers}; stop() ends a fleet")
        draining = [server for server in self.servers() if server.number >= servers]
        for server in draining:
            if server.ready:
                self._cordon(server)
        for server in draining:
            self._wait(
                partial(self._is_idle, server),
                idle_timeout_s,
                f"{server.name} to have no session; scale again later",
            )
        self._resize(servers)
        self.wait_ready(servers, ready_timeout_s)

    def roll(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Replace all servers, one after another; see `replace`."""
        for server in self.servers():
            self.replace(server.name, timeout_s)

    def load(self) -> Load:
        """Return the sessions of all servers that answer."""
        loads = [load for url in self.urls() if (load := read_load(url, self.token)) is not None]
        return Load(*(sum(getattr(load, name) for load in loads) for name in Load.__slots__))

    def autoscale(self, least: int, most: int, pause: Callable[[], object]) -> None:
        """Keep the number of servers between two, by their sessions and queues, until `pause` raises.

        One is added while clients wait and all others are ready. One leaves, as in `scale`, if a tenth of the slots
        stays free without it, or if there are too many; if clients wait before it is idle, it is started anew once it
        is. One that is to leave at the end is waited for.

        Args:
            least: The fewest servers.
            most: The most servers.
            pause: Called before each look; sleeps.
        """
        try:
            while True:
                pause()
                try:
                    self._follow_load(least, most)
                except ProviderError as error:  # of this look; the engine may answer at the next one
                    logger.warning("fleet %s was not resized: %s", self.name, error)
        finally:
            if (draining := self._draining) is not None:  # nobody will look at it again
                logger.warning("waiting for %s, which leaves, to have no session", draining.name)
                self.scale(draining.number)
                self._draining = None

    def _follow_load(self, least: int, most: int) -> None:
        """Add or remove a server if the load says so."""
        servers, load, draining = self.servers(), self.load(), self._draining
        count = len(servers)
        if draining is not None and self._is_idle(draining):
            if draining.number == count - 1 and (not load.waiting or count > most):
                self._resize(count - 1)
            else:
                self._uncordon(draining)
            self._draining = None
        elif count < least:
            self._resize(least)
        elif load.waiting and count <= most:
            if count < most and all(server.ready for server in servers):
                self._resize(count + 1)
        elif draining is None and (
            count > most or (count > least and load.in_use < 0.9 * load.slots * (1 - 1 / count))
        ):
            self._draining = servers[-1]
            self._cordon(servers[-1])

    def _find(self, name: str) -> FleetServer:
        for server in self.servers():
            if server.name == name:
                return server
        raise ProviderError(f"expected a server of the fleet {self.name}, got {name!r}; see its status")

    def _is_idle(self, server: FleetServer) -> bool:
        """Whether a server has no sessions, or is gone; not if it is merely silent."""
        if server.url is not None and (load := read_load(server.url, self.token)) is not None:
            return load.in_use == 0
        return not any(known.ready for known in self.servers() if known.name == server.name)

    def _wait(self, condition: Callable[[], bool], timeout_s: float, goal: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise ProviderError(f"fleet {self.name}: expected within {timeout_s:g} s {goal}")
            if self._stopping.wait(POLL_INTERVAL_S):
                raise ProviderError(f"fleet {self.name}: it was stopped meanwhile")


def fleet_class(engine: str) -> type[ServerFleet]:
    """Return the class of fleets on an engine.

    Raises:
        ConfigurationError: There is no such engine.
    """
    if engine not in ENGINES:
        raise ConfigurationError(f"expected a fleet on {', '.join(ENGINES)}, got {engine!r}")
    found: type[ServerFleet] = resolve_name(ENGINES[engine])
    return found


def open_fleet(engine: str, target: str, servers: int, options: Mapping[str, Any]) -> ServerFleet:
    """Return a fleet that is not started yet.

    Args:
        engine: `ray`, `docker`, `kubernetes` or `agent-sandbox`.
        target: What Ray's servers serve, as for `ropewalk serve`; the image of containers, or the pool of sandboxes.
        servers: Number of servers.
        options: Further arguments of the fleet's class.

    Raises:
        ConfigurationError: The engine, or an option, does not exist.
    """
    cls: Any = fleet_class(engine)
    try:
        fleet: ServerFleet = cls(target, servers, **options)
    except TypeError as error:
        raise ConfigurationError(f"expected options of {cls.__name__}, got: {error}") from error
    return fleet


def read_load(url: str, token: str | None) -> Load | None:
    """Return the sessions of a server; None if it does not answer.

    Raises:
        ProviderError: Its answer has no sessions.
    """
    import httpx  # takes longer than the rest of `ropewalk --help`

    try:
        with client_for(url, token) as http:
            response = http.get(f"{url}/capacity", timeout=REQUEST_TIMEOUT_S)
        numbers = response.json()
        return Load(*(int(numbers[name]) for name in Load.__slots__))
    except httpx.HTTPError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ProviderError(
            f"expected the sessions of {url} on /capacity, got HTTP {response.status_code}; released "
            "servers have no such path"
        ) from error
