"""Warm containers, lent one by one."""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, Self

from openenv_core.errors import ConfigurationError, ProviderError
from openenv_core.providers.base import OwnedServerProvider
from openenv_core.providers.docker.container import Container, start_container
from openenv_core.providers.docker.options import ContainerOptions, options_with
from openenv_core.providers.keeper import (
    MemberT,
    PoolClosedError,
    PoolError,
    PoolKeeper,
    PoolState,
    PoolTimeoutError,
    healthy,
)
from openenv_core.types import ActT, ObsT, StateT

if TYPE_CHECKING:
    from openenv_core.client import EnvClient, SyncEnvClient

__all__ = ["DockerPool", "PoolClosedError", "PoolError", "PoolLease", "PoolTimeoutError"]

logger = logging.getLogger("openenv_core")

LEASE_TIMEOUT_S: Final = 60.0
CLOSE_TIMEOUT_S: Final = 30.0

EXIT_TIMEOUT_S: Final = 10.0
"""How long the exit of this process waits for pools that nobody closed."""

LEND_HEALTH_TIMEOUT_S: Final = 2.0
"""How long a container may take, when it is handed out, to say that it is healthy. It mostly takes 2 ms."""


class PoolLease(Generic[MemberT]):
    """A container leased to one caller until it is closed; it is not reused.

    One that is dropped without `close` is given back when it is collected.

    Args:
        container: The container.
        give_back: Takes it back. Must not block.
        pool: Is kept for as long as the lease: one that is collected removes all its containers.
    """

    def __init__(self, container: MemberT, give_back: Callable[[MemberT], None], pool: object) -> None:
        self._pool = pool
        self._container = container
        self._return = weakref.finalize(self, give_back, container)
        self._return.atexit = False  # all of the pool goes then

    @property
    def container(self) -> MemberT:
        """The container.

        Raises:
            PoolError: It was given back. Its port may be another's by now.
        """
        if self.closed:
            raise PoolError("expected the lease's container, got one that was given back; take another lease")
        return self._container

    @property
    def url(self) -> str:
        """Where its server is. Raises as `container` does."""
        return self.container.url

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return not self._return.alive

    def close(self) -> None:
        """Give the container back, to be removed and replaced. Does not wait for that. Idempotent."""
        self._return()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PoolProvider(OwnedServerProvider, Generic[MemberT]):
    """Takes one container from a pool at a time. A start raises what `lease` of the pool does.

    Args:
        lease: Takes one, within so many seconds, or raises once the event is set.
        timeout_s: Seconds that a container may take to be free.
    """

    def __init__(
        self, lease: Callable[[float, threading.Event], PoolLease[MemberT]], timeout_s: float
    ) -> None:
        super().__init__()
        self._take = lease
        self._timeout_s = timeout_s
        self._stopping = threading.Event()
        self._lease: PoolLease[MemberT] | None = None

    @property
    def alive(self) -> bool:
        """Whether the container that was taken still runs."""
        lease = self._lease
        if lease is None:
            return False
        alive: Any = getattr(lease.container, "alive", True)
        try:
            return bool(alive() if callable(alive) else alive)
        except ProviderError:
            return True  # an engine that does not answer says nothing of its containers

    def output(self) -> str:
        """Return the last of what the container printed; empty where there is none."""
        lease = self._lease
        logs: Any = None if lease is None else getattr(lease.container, "logs", None)
        try:
            return str(logs()) if callable(logs) else ""
        except ProviderError as error:
            return f"[no output: {error}]"

    def _launch(self) -> str:
        self._stopping.clear()
        self._lease = self._take(self._timeout_s, self._stopping)
        return self._lease.url

    def _interrupt(self) -> None:
        self._stopping.set()

    def _stop(self) -> None:
        self._url = None
        if self._lease is not None:
            self._lease.close()
            self._lease = None


class ServerPool(Generic[MemberT]):
    """Keeps servers warm and hands each out once. `DockerPool` is one of containers.

    Args:
        start: Makes a member and returns once it is healthy; raises where the event is set meanwhile. Called from
            threads of the pool.
        size: How many members there are, warm or handed out.
        max_starting: How many are started at once.

    Raises:
        ConfigurationError: A number is below 1.
    """

    def __init__(self, start: Callable[[threading.Event], MemberT], size: int, max_starting: int) -> None:
        for name, number in (("size", size), ("max_starting", max_starting)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ConfigurationError(f"expected {name} to be a whole number from 1 on, got {number!r}")
        self._size = size
        self._keeper = PoolKeeper(start, size, max_starting)
        _keepers.add(self._keeper)
        weakref.finalize(self, self._keeper.abandon).atexit = False  # see _close_all

    @property
    def state(self) -> PoolState:
        """The state of the pool."""
        return self._keeper.state()

    def start(self) -> Self:
        """Begin to fill the pool. The first lease does so too. Idempotent.

        Raises:
            PoolClosedError: The pool was closed.
        """
        self._keeper.run()
        return self

    def wait(self, ready: int | None = None, timeout_s: float = LEASE_TIMEOUT_S) -> None:
        """Wait until so many members are ready; by default all of them.

        Raises:
            PoolTimeoutError: They were not in time.
            PoolError: The pool was closed, or cannot go on.
        """
        self._keeper.run()
        ready = self._size if ready is None else ready
        with self._keeper.changed:
            deadline = time.monotonic() + timeout_s
            self._keeper.wait(ready, f"{ready} containers to be ready", deadline, timeout_s)

    def lease(self, timeout_s: float = LEASE_TIMEOUT_S) -> PoolLease[MemberT]:
        """Take a healthy member.

        Args:
            timeout_s: Seconds to wait for one. While the pool has one ready it takes a few milliseconds.

        Raises:
            PoolTimeoutError: None was free in time; the message says what the pool is doing.
            PoolError: The pool was closed, or cannot go on.
        """
        return self._take(timeout_s, None)

    def provider(self, timeout_s: float = LEASE_TIMEOUT_S) -> PoolProvider[MemberT]:
        """Return what takes a member when a client starts, and gives it back when the client is closed."""
        return PoolProvider(self._take, timeout_s)

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
        if left := self._keeper.close(timeout_s):
            logger.warning("%d containers of a pool are left to the companion process", left)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, timeout_s: float, stopping: threading.Event | None) -> PoolLease[MemberT]:
        self._keeper.run()
        deadline = time.monotonic() + timeout_s
        while True:
            member = self._keeper.take(deadline, timeout_s, stopping)
            lease = PoolLease(member, self._keeper.give_back, self)
            try:
                fine = healthy(member, LEND_HEALTH_TIMEOUT_S)
            except BaseException:
                lease.close()
                raise
            if fine:
                return lease
            lease.close()  # it has died since it was last looked at


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


_keepers: "weakref.WeakSet[PoolKeeper[Any]]" = weakref.WeakSet()


def _close_all() -> None:
    """Close the open pools, at the interpreter's exit.

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
    for keeper in list(_keepers):
        keeper.changed = threading.Condition()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_in_fork)
