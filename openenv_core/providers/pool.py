"""Pools of warm containers, each lent once."""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, Self

from openenv_core.errors import ConfigurationError
from openenv_core.providers.docker.container import Container, ContainerProvider, PinnedImage, start_container
from openenv_core.providers.docker.engine import DockerEngine
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
"""How long this process's exit waits for pools that were not closed."""

LEND_HEALTH_TIMEOUT_S: Final = 2.0
"""Timeout of the health check before a container is lent. It usually takes 2 ms."""


class PoolLease(Generic[MemberT]):
    """A lease of a container, held until `close`. The container is not reused.

    A lease that is not closed ends when it is garbage-collected.

    Args:
        container: The container.
        give_back: Returns the container to the pool. Must not block.
        pool: The pool; referenced because a pool that is garbage-collected removes all its containers.
    """

    def __init__(self, container: MemberT, give_back: Callable[[MemberT], None], pool: object) -> None:
        self._pool = pool
        self._container = container
        self._return = weakref.finalize(self, give_back, container)
        self._return.atexit = False  # at exit the whole pool is removed

    @property
    def container(self) -> MemberT:
        """The container.

        Raises:
            PoolError: The lease was closed; the port may belong to another container now.
        """
        if self.closed:
            raise PoolError("the lease's container was given back; take another lease")
        return self._container

    @property
    def url(self) -> str:
        """URL of the container's server. Raises as `container` does."""
        return self.container.url

    @property
    def closed(self) -> bool:
        """Whether the lease was closed."""
        return not self._return.alive

    def close(self) -> None:
        """Return the container, to be removed and replaced in the background. Idempotent."""
        self._return()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PoolProvider(ContainerProvider, Generic[MemberT]):
    """A provider that leases one container at a time from a pool. `start` raises as the pool's `lease` does.

    Args:
        lease: Leases a container, given a timeout in seconds and an event that aborts the wait.
        timeout_s: Seconds to wait for a free container.
    """

    def __init__(
        self, lease: Callable[[float, threading.Event], PoolLease[MemberT]], timeout_s: float
    ) -> None:
        super().__init__()
        self._acquire = lease
        self._timeout_s = timeout_s
        self._lease: PoolLease[MemberT] | None = None

    def _take(self) -> Any:
        self._lease = self._acquire(self._timeout_s, self._stopping)
        return self._lease.container

    def _give_back(self, container: object) -> None:
        assert self._lease is not None
        self._lease.close()
        self._lease = None


class ServerPool(Generic[MemberT]):
    """Keeps servers warm and lends each once. `DockerPool` is a pool of containers.

    Args:
        start: Starts a member and returns it once it is healthy; raises if the event is set meanwhile. Called from
            threads of the pool.
        size: Number of members, warm and lent.
        max_starting: Maximum number of concurrent starts.

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
        """Start to fill the pool, which the first lease also does. Idempotent.

        Raises:
            PoolClosedError: The pool was closed.
        """
        self._keeper.run()
        return self

    def wait(self, ready: int | None = None, timeout_s: float = LEASE_TIMEOUT_S) -> None:
        """Wait until `ready` members are ready; by default all.

        Raises:
            PoolTimeoutError: They were not ready in time.
            PoolError: The pool was closed, or its thread has died.
        """
        self._keeper.run()
        ready = self._size if ready is None else ready
        with self._keeper.changed:
            deadline = time.monotonic() + timeout_s
            self._keeper.wait(ready, f"{ready} containers to be ready", deadline, timeout_s)

    def lease(self, timeout_s: float = LEASE_TIMEOUT_S) -> PoolLease[MemberT]:
        """Lease a healthy member.

        Args:
            timeout_s: Seconds to wait for a member. If one is ready, leasing takes a few milliseconds.

        Raises:
            PoolTimeoutError: No member was free in time; the message has the pool's state.
            PoolError: The pool was closed, or its thread has died.
        """
        return self._take(timeout_s, None)

    def provider(self, timeout_s: float = LEASE_TIMEOUT_S) -> PoolProvider[MemberT]:
        """Return a provider that leases a member when a client starts, and returns it when the client is closed."""
        return PoolProvider(self._take, timeout_s)

    def client(
        self,
        client_class: "type[EnvClient[ActT, ObsT, StateT]]",
        *,
        lease_timeout_s: float = LEASE_TIMEOUT_S,
        **client_options: Any,
    ) -> "SyncEnvClient[ActT, ObsT, StateT]":
        """Return a client with a member of its own, which the client's `close` returns to the pool.

        The member is leased when the client is first used. Await the returned sync client to get the connected async
        one.

        Args:
            client_class: The environment's client class.
            lease_timeout_s: Seconds to wait for a member.
            client_options: Arguments of the client's constructor.
        """
        return client_class(provider=self.provider(lease_timeout_s), **client_options).sync()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Remove all members, including lent ones. Idempotent.

        The companion process removes those that cannot be removed in time because the engine is unavailable.
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
                is_healthy = healthy(member, LEND_HEALTH_TIMEOUT_S)
            except BaseException:
                lease.close()
                raise
            if is_healthy:
                return lease
            lease.close()  # it has died since the last health check


class DockerPool(ServerPool[Container]):
    """Keeps containers of an image warm and lends each once, within milliseconds.

    A returned container is removed and replaced in the background. Containers that die before they are lent are
    replaced too, also all of them after an engine's restart. All are of the image that the name has at the first start:
    for one that was built again, open another pool.

        with DockerPool("blackjack-env:latest", size=4) as pool:
            with pool.client(BlackjackEnv) as env:
                env.reset()

    Args:
        image: Name or id of the image.
        size: Number of containers, warm and lent.
        options: Options of each container.
        max_starting: Maximum number of concurrent starts.
        option_fields: Fields of `ContainerOptions`, which override those of `options`.

    Raises:
        ConfigurationError: An option is invalid, or a number below 1.
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

        pinned = PinnedImage(image)

        def start(stopping: threading.Event) -> Container:
            engine = DockerEngine.find()
            return start_container(
                image, checked, engine=engine, image_id=pinned.id(engine), stopping=stopping
            )

        super().__init__(start, size, max_starting)


_keepers: "weakref.WeakSet[PoolKeeper[Any]]" = weakref.WeakSet()


def _close_all() -> None:
    """Close open pools at interpreter exit.

    Registered after the companion's exit handler, and so runs before it: after that, no container may be started.
    """
    keepers = list(_keepers)
    for keeper in keepers:
        keeper.abandon()
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for keeper in keepers:
        keeper.close(max(0.0, deadline - time.monotonic()))


def _in_fork() -> None:
    """Renew locks in a fork, because a thread of the parent may have held them."""
    for keeper in list(_keepers):
        keeper.changed = threading.Condition()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_in_fork)
