"""Warm containers, lent one by one."""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar
from urllib.parse import urlsplit

from openenv_core.errors import ConfigurationError, ProviderError
from openenv_core.providers.base import health_of, stopped
from openenv_core.providers.docker.container import Container, start_container
from openenv_core.providers.docker.options import ContainerOptions, options_with
from openenv_core.providers.pool.keeper import (
    MemberT,
    PoolClosedError,
    PoolError,
    PoolKeeper,
    PoolLease,
    PoolMember,
    PoolState,
    Start,
    Stock,
)
from openenv_core.types import ActT, ObsT, StateT

if TYPE_CHECKING:
    from openenv_core.client import EnvClient, SyncEnvClient


class PoolProvider(Generic[MemberT]):
    """Takes one container from a pool at a time.

    Args:
        lease: Takes one, within so many seconds, or raises once the event is set.
        timeout_s: Seconds that a container may take to be free.
    """

    def __init__(
        self, lease: Callable[[float, threading.Event], PoolLease[MemberT]], timeout_s: float
    ) -> None:
        self._take = lease
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._lease: PoolLease[MemberT] | None = None

    @property
    def alive(self) -> bool:
        """Whether the container that was taken still runs."""
        lease = self._lease
        if lease is None or lease.closed:
            return False
        alive: Any = getattr(lease.container, "alive", True)
        try:
            return bool(alive() if callable(alive) else alive)
        except ProviderError:
            return True  # an engine that does not answer says nothing of its containers

    def output(self) -> str:
        """Return the last of what the container printed; empty where there is none."""
        lease = self._lease
        logs: Any = getattr(lease.container, "logs", None) if lease is not None and not lease.closed else None
        try:
            return str(logs()) if callable(logs) else ""
        except ProviderError as error:
            return f"[no output: {error}]"

    def start(self) -> str:
        """Take a container, and return its URL. A second call returns the same.

        Raises:
            PoolTimeoutError: None was free in time.
            PoolError: The pool was closed, or cannot go on.
        """
        with self._lock:
            if self._lease is None:
                self._stopping.clear()
                self._lease = self._take(self._timeout_s, self._stopping)
            return self._lease.url

    def stop(self) -> None:
        """Give the container back. Idempotent. A start that waits in another thread fails then."""
        with stopped(self._stopping.set, self._lock):
            if self._lease is not None:
                self._lease.close()
                self._lease = None


logger = logging.getLogger("openenv_core")

ClientT = TypeVar("ClientT", bound="EnvClient[Any, Any, Any]")

LEASE_TIMEOUT_S: Final = 60.0
CLOSE_TIMEOUT_S: Final = 30.0

EXIT_TIMEOUT_S: Final = 10.0
"""How long the exit of this process waits for pools that nobody closed."""

LEND_HEALTH_TIMEOUT_S: Final = 2.0
"""How long a container may take, when it is handed out, to say that it is healthy. It mostly takes 2 ms."""


class ServerPool(Generic[MemberT]):
    """Keeps servers warm and hands each out once. `DockerPool` is one of containers.

    Args:
        start: Makes a member; called from threads of the pool.
        size: How many members there are, warm or handed out.
        max_starting: How many are started at once.

    Raises:
        ConfigurationError: A number is below 1.
    """

    def __init__(self, start: Start, size: int, max_starting: int) -> None:
        for name, number in (("size", size), ("max_starting", max_starting)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ConfigurationError(
                    f"expected {name} to be a whole number of at least 1, got {number!r}"
                )
        self._start = start
        self._max_starting = max_starting
        self._stock = Stock(size)
        self._lock = threading.Lock()
        self._keeper: PoolKeeper | None = None
        self._closed = False
        _pools.add(self)

    @property
    def state(self) -> PoolState:
        """How the pool stands."""
        return self._stock.state()

    def start(self) -> Self:
        """Begin to fill the pool. The first lease does so too. Idempotent.

        Raises:
            PoolClosedError: The pool was closed.
        """
        self._running()
        return self

    def wait(self, ready: int | None = None, timeout_s: float = LEASE_TIMEOUT_S) -> None:
        """Wait until so many members are ready; by default all of them.

        Raises:
            PoolTimeoutError: They were not in time.
            PoolError: The pool was closed, or cannot go on.
        """
        keeper = self._running()
        wanted = self._stock.size if ready is None else ready
        self._stock.wait_for(wanted, time.monotonic() + timeout_s, timeout_s, keeper.require_alive)

    def lease(self, timeout_s: float = LEASE_TIMEOUT_S) -> PoolLease[MemberT]:
        """Take a healthy member.

        Args:
            timeout_s: Seconds to wait for one. While the pool has one ready it takes a few milliseconds.

        Raises:
            PoolTimeoutError: None was free in time; the message says what the pool is doing.
            PoolError: The pool was closed, or cannot go on.
        """
        return self._leased(timeout_s, None)

    def provider(self, timeout_s: float = LEASE_TIMEOUT_S) -> PoolProvider[MemberT]:
        """Return what takes a member when a client starts, and gives it back when the client is closed."""
        return PoolProvider(self._leased, timeout_s)

    def client(
        self,
        client_class: "type[EnvClient[ActT, ObsT, StateT]]",
        *,
        lease_timeout_s: float = LEASE_TIMEOUT_S,
        **client_options: Any,
    ) -> "SyncEnvClient[ActT, ObsT, StateT]":
        """Return a client of a member of its own, which `close` gives back to be replaced.

        The member is taken when the client is first used. The sync client that is returned can be awaited to the
        connected async one.

        Args:
            client_class: The environment's client.
            lease_timeout_s: Seconds to wait for a member.
            client_options: What the client's constructor takes.
        """
        return client_class(provider=self.provider(lease_timeout_s), **client_options).sync()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Remove every member, those that are in use included. Idempotent.

        What cannot be removed in time, because the engine is away, is left to the companion process.
        """
        with self._lock:
            self._closed = self._stock.closed = True
            keeper = self._keeper
        if keeper is not None and (left := keeper.close(timeout_s)):
            logger.warning("%d containers of a pool are left to the companion process", len(left))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _leased(self, timeout_s: float, stopping: threading.Event | None) -> PoolLease[MemberT]:
        keeper = self._running()
        deadline = time.monotonic() + timeout_s

        def look() -> None:
            keeper.require_alive()
            if stopping is not None and stopping.is_set():
                raise PoolError("expected a container, but its taker was stopped meanwhile")

        while True:
            member: Any = self._stock.take(deadline, timeout_s, look)
            lease: PoolLease[MemberT] = PoolLease(member, keeper.give_back, self)
            try:
                fine = _healthy(member, LEND_HEALTH_TIMEOUT_S)
            except BaseException:
                lease.close()
                raise
            if fine:
                return lease
            lease.close()  # it has died since it was last looked at

    def _running(self) -> PoolKeeper:
        with self._lock:
            if self._closed:
                raise PoolClosedError("expected an open pool, got one that was closed; make a new one")
            if self._keeper is None:
                self._keeper = PoolKeeper(self._stock, self._start, _healthy, self._max_starting)
                _keepers.add(self._keeper)
                weakref.finalize(self, self._keeper.abandon).atexit = False  # see _close_all
            return self._keeper


class DockerPool(ServerPool[Container]):
    """Keeps healthy containers of one image and hands each out once, in milliseconds.

    A container that was given back is removed, and another is started in its place, in the background. Those that
    die while they wait are replaced; so are all of them after the engine was restarted.

        with DockerPool("blackjack-env:latest", size=4) as pool:
            with pool.client(BlackjackEnv) as env:
                env.reset()

    Args:
        image: Name or id of the image.
        size: How many containers there are, warm or handed out.
        options: What each container gets.
        max_starting: How many are started at once.
        option_fields: Fields of `ContainerOptions`, instead of those in `options` or beside them.

    Raises:
        ConfigurationError: An option that cannot be, or a number below 1.
    """

    def __init__(
        self,
        image: str,
        size: int = 4,
        *,
        options: ContainerOptions | None = None,
        max_starting: int = 2,
        **option_fields: Any,
    ) -> None:
        self.image = image
        self.options = checked = options_with(options, option_fields)

        def start(stopping: threading.Event) -> Container:
            return start_container(image, checked, stopping=stopping)

        super().__init__(start, size, max_starting)


_pools: "weakref.WeakSet[ServerPool[Any]]" = weakref.WeakSet()
_keepers: "weakref.WeakSet[PoolKeeper]" = weakref.WeakSet()


def _close_all() -> None:
    """Close what was forgotten, at the interpreter's exit.

    It is registered after the companion's own end, and so runs before it: from then on nobody starts a container.
    """
    keepers = list(_keepers)
    for keeper in keepers:
        keeper.abandon()
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for keeper in keepers:
        keeper.close(max(0.0, deadline - time.monotonic()))


def _in_fork() -> None:
    """Let go of what a thread of the parent may have held: there is nobody here who would."""
    for pool in list(_pools):
        pool._lock = threading.Lock()
        pool._stock.changed = threading.Condition()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_in_fork)


def _healthy(member: PoolMember, timeout_s: float) -> bool:
    options = getattr(member, "options", None)  # of a container; its server may want a token
    token = None if options is None else options.token
    return health_of(urlsplit(member.url).port or 80, timeout_s, token) is None
