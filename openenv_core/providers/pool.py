"""Pools of warm containers, each lent once."""

import atexit
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from openenv_core.backoff import exponential_pause_s
from openenv_core.errors import ConfigurationError, ImageNotFoundError, OptionUnavailableError, ProviderError
from openenv_core.providers.base import health_of
from openenv_core.providers.docker.container import Container, ContainerProvider, PinnedImage, start_container
from openenv_core.providers.docker.engine import DockerEngine
from openenv_core.providers.docker.options import ContainerOptions, options_with
from openenv_core.types import ActT, ObsT, StateT

if TYPE_CHECKING:
    from openenv_core.client import EnvClient, SyncEnvClient

logger = logging.getLogger("openenv_core")

LEASE_TIMEOUT_S: Final = 60.0
CLOSE_TIMEOUT_S: Final = 30.0

EXIT_TIMEOUT_S: Final = 10.0
"""How long this process's exit waits for a pool that was not closed."""

LEND_HEALTH_TIMEOUT_S: Final = 2.0
"""Timeout of the health check before a container is lent. It usually takes 2 ms."""

IDLE_INTERVAL_S: Final = 1.0
"""How often the health of a ready container is checked."""

HEALTH_TIMEOUT_S: Final = 1.0
"""Timeout of that check."""

POLL_INTERVAL_S: Final = 0.5
"""How often a waiting provider checks whether it was stopped."""

MIN_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0
"""Range of the pauses after failures; after an engine's restart, starts resume within the longest."""

PERSISTENT_FAILURE_BACKOFF_S: Final = 30.0
"""Pause after errors that the user must fix, such as a missing image."""

PERMANENT_ERRORS: Final = (ConfigurationError, ImageNotFoundError, OptionUnavailableError)
"""Errors that waiting does not fix."""


class PoolError(ProviderError):
    """The pool can lend no more containers."""


class PoolClosedError(PoolError):
    """The pool was closed."""


class PoolTimeoutError(PoolError, TimeoutError):
    """No container was free in time. The pool continues."""

    @property
    def last_failure(self) -> BaseException | None:
        """Exception of the last failed start or removal; None if one has succeeded since."""
        return self.__cause__


@dataclass(frozen=True, slots=True)
class PoolState:
    """The state of a pool.

    Attributes:
        size: Number of containers to keep; the others below, and those that wait for a start, add up to it.
        ready: Number of containers ready to lend.
        starting: Number of containers being started.
        used: Number of lent containers.
        leaving: Number of containers being removed.
        started: Number of successful starts.
        failed: Number of failed starts.
        last_failure: Exception of the last failed start or removal, unless one has succeeded since.
    """

    size: int
    ready: int
    starting: int
    used: int
    leaving: int
    started: int
    failed: int
    last_failure: BaseException | None

    def __str__(self) -> str:
        text = (
            f"of {self.size} containers {self.ready} are ready, {self.starting} starting, {self.used} used; "
            f"{self.leaving} are being removed"
        )
        if self.last_failure is not None:
            reason = str(self.last_failure).strip() or type(self.last_failure).__name__
            text += f"; {self.failed} starts failed; the last failure: {reason}"
        return text


class PoolLease:
    """A lease of a container, held until `close`. The container is not reused.

    A lease that is not closed ends when it is garbage-collected.

    Args:
        container: The container.
        give_back: Returns the container to the pool. Must neither block nor take a lock.
    """

    def __init__(self, container: Container, give_back: Callable[[], None]) -> None:
        self._container = container
        self._return = weakref.finalize(self, give_back)
        self._return.atexit = False  # at exit the whole pool is removed

    @property
    def container(self) -> Container:
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


class PoolProvider(ContainerProvider):
    """A provider that leases one container at a time from a pool. `start` raises as the pool's `lease` does.

    Args:
        lease: Leases a container, given a timeout in seconds and an event that aborts the wait.
        timeout_s: Seconds to wait for a free container.
    """

    def __init__(self, lease: Callable[[float, threading.Event], PoolLease], timeout_s: float) -> None:
        super().__init__()
        self._acquire, self._timeout_s = lease, timeout_s

    def _take(self) -> tuple[Container, Callable[[], None]]:
        lease = self._acquire(self._timeout_s, self._stopping)
        return lease.container, lease.close


_Phase: TypeAlias = Literal["missing", "starting", "ready", "used", "leaving"]


@dataclass(eq=False, slots=True)
class _Slot:
    """The place of one container, kept by a thread of its own.

    Attributes:
        phase: Where the container is in its life.
        container: The container, from "ready" to "leaving".
        ready_at: When it became ready, of `time.monotonic()`.
        ended: Receives an item when the container is returned, or the pool closed. Its `put` may be called by
            finalizers.
    """

    phase: _Phase = "missing"
    container: Container | None = None
    ready_at: float = 0.0
    ended: "SimpleQueue[None]" = field(default_factory=SimpleQueue)


class DockerPool:
    """Keeps containers of an image warm and lends each once, within milliseconds.

    A returned container is removed and replaced in the background. Containers that die before they are lent are
    replaced too, also all of them after an engine's restart. All are of the image that the name has at the first start:
    for one that was built again, open another pool.

        with DockerPool("blackjack-env:latest", size=4) as pool:
            with pool.client(BlackjackEnv) as env:
                env.reset()

    Each of the `size` places has a thread, which starts a container, waits until it is returned or has died, removes
    it, and begins again.

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
        for name, number in (("size", size), ("max_starting", max_starting)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ConfigurationError(f"expected {name} to be a whole number from 1 on, got {number!r}")
        self.image = image
        self.options = options_with(options, option_fields)
        self._pinned = PinnedImage(image)
        self._max_starting = max_starting
        self._stopping = threading.Event()
        self._pid: int | None = None
        # Protects everything below, and the phases; notified when one of them changes.
        self._changed = threading.Condition()
        self._slots = [_Slot() for _ in range(size)]
        self._threads: list[threading.Thread] = []
        self._started = self._failed = 0
        self._failures = 0  # since the last successful start
        self._last_failure: BaseException | None = None
        self._next_start = 0.0

    @property
    def state(self) -> PoolState:
        """The state of the pool."""
        with self._changed:
            counts = Counter(slot.phase for slot in self._slots)
            phases = counts["ready"], counts["starting"], counts["used"], counts["leaving"]
            totals = self._started, self._failed, self._last_failure
            return PoolState(len(self._slots), *phases, *totals)

    def start(self) -> Self:
        """Start to fill the pool, which the first lease also does. Idempotent.

        Raises:
            PoolClosedError: The pool was closed.
            PoolError: This process is a fork of the pool's.
        """
        self._require_open()
        with self._changed:
            if not self._threads:
                self._pid = os.getpid()
                self._threads = [
                    threading.Thread(target=self._keep, args=(slot,), name="openenv-pool", daemon=True)
                    for slot in self._slots
                ]
                for thread in self._threads:
                    thread.start()
                # Runs before the companion's exit handler: after that, no container may be started.
                atexit.register(self.close, EXIT_TIMEOUT_S)
        return self

    def wait(self, ready: int | None = None, timeout_s: float = LEASE_TIMEOUT_S) -> None:
        """Wait until `ready` containers are ready; by default all.

        Raises:
            PoolTimeoutError: They were not ready in time.
            PoolError: The pool was closed.
        """
        self.start()
        ready = len(self._slots) if ready is None else ready
        with self._changed:
            self._wait_ready(ready, time.monotonic() + timeout_s, timeout_s)

    def lease(self, timeout_s: float = LEASE_TIMEOUT_S, stopping: threading.Event | None = None) -> PoolLease:
        """Lease a healthy container.

        Args:
            timeout_s: Seconds to wait for a container. If one is ready, leasing takes a few milliseconds.
            stopping: Aborts the wait when set.

        Raises:
            PoolTimeoutError: No container was free in time; the message has the pool's state.
            PoolError: The pool was closed.
        """
        self.start()
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                self._wait_ready(1, deadline, timeout_s, stopping)
                # The oldest, because it is the most likely to have settled.
                slot = min(self._in("ready"), key=lambda slot: slot.ready_at)
                slot.phase, container = "used", slot.container
            assert container is not None
            # If an interrupt ends the check, the lease is dropped, and so returned.
            lease = PoolLease(container, partial(slot.ended.put, None))
            if healthy(container, LEND_HEALTH_TIMEOUT_S):
                return lease
            lease.close()  # it has died since the last health check

    def provider(self, timeout_s: float = LEASE_TIMEOUT_S) -> PoolProvider:
        """Return a provider that leases a container when a client starts, and returns it when the client is closed."""
        return PoolProvider(self.lease, timeout_s)

    def client(
        self,
        client_class: "type[EnvClient[ActT, ObsT, StateT]]",
        *,
        lease_timeout_s: float = LEASE_TIMEOUT_S,
        **client_options: Any,
    ) -> "SyncEnvClient[ActT, ObsT, StateT]":
        """Return a client with a container of its own, which the client's `close` returns to the pool.

        The container is leased when the client is first used. Await the returned sync client to get the connected async
        one.

        Args:
            client_class: The environment's client class.
            lease_timeout_s: Seconds to wait for a container.
            client_options: Arguments of the client's constructor.
        """
        return client_class(provider=self.provider(lease_timeout_s), **client_options).sync()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Remove all containers, including lent ones. Idempotent. Does nothing in a fork of the pool's process.

        Those that cannot be removed in time, because the engine is unavailable, are removed later by the pool's
        threads, or after this process by the companion.
        """
        if self._pid not in (None, os.getpid()):
            return
        atexit.unregister(self.close)
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        for slot in self._slots:
            slot.ended.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if left := sum(thread.is_alive() for thread in self._threads):
            logger.warning("%d containers of a closed pool are not removed yet", left)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        # Takes no lock, which a thread of the parent may have held when this process was forked.
        if self._pid not in (None, os.getpid()):
            raise PoolError("this process is a fork of the pool's; make a new pool in it")
        if self._stopping.is_set():
            raise PoolClosedError("the pool is closed; make a new one")

    def _in(self, phase: _Phase) -> list[_Slot]:
        return [slot for slot in self._slots if slot.phase == phase]

    def _wait_ready(
        self, ready: int, deadline: float, timeout_s: float, stopping: threading.Event | None = None
    ) -> None:
        """Wait until `ready` containers are ready. The caller holds the lock. Raises as `lease` does."""
        while True:
            if stopping is not None and stopping.is_set():
                raise PoolError("expected a container, but its taker was stopped meanwhile")
            self._require_open()
            state = self.state
            if state.ready >= ready:
                return
            left_s = deadline - time.monotonic()
            failure = state.last_failure
            if isinstance(failure, PERMANENT_ERRORS) and not state.starting and not state.used:
                raise PoolTimeoutError(
                    f"expected {ready} ready, got {state.ready}, and no wait will bring one: {state}"
                ) from failure
            if left_s <= 0:
                hint = "see the failure" if failure else "give containers back, or raise size or timeout_s"
                raise PoolTimeoutError(
                    f"expected {ready} ready within {timeout_s:g} s, got {state.ready}: {state}; {hint}"
                ) from failure
            self._changed.wait(min(left_s, POLL_INTERVAL_S))

    def _start_container(self) -> Container:
        engine = DockerEngine.find()
        image_id = self._pinned.id(engine)
        return start_container(
            self.image, self.options, engine=engine, image_id=image_id, stopping=self._stopping
        )

    def _keep(self, slot: _Slot) -> None:
        """Keep one place filled until the pool is closed."""
        while self._wait_to_start(slot):
            try:
                container = self._start_container()
            except Exception as error:
                self._note_failure(slot, error)
                continue
            with self._changed:
                slot.container, slot.phase, slot.ready_at = container, "ready", time.monotonic()
                self._started += 1
                self._failures, self._last_failure = 0, None
                self._changed.notify_all()
            self._wait_for_end(slot, container)
            self._remove(slot, container)

    def _wait_to_start(self, slot: _Slot) -> bool:
        """Wait for this place's turn to start a container; return whether there is one, as the pool is open."""
        with self._changed:
            while not self._stopping.is_set():
                # After a failure, one start is enough to probe.
                limit = 1 if self._failures else self._max_starting
                pause_s = self._next_start - time.monotonic()
                if pause_s <= 0 and len(self._in("starting")) < limit:
                    slot.phase = "starting"
                    return True
                self._changed.wait(pause_s if pause_s > 0 else None)
        return False

    def _note_failure(self, slot: _Slot, failure: Exception) -> None:
        with self._changed:
            slot.phase = "missing"
            self._changed.notify_all()
            if self._stopping.is_set():
                return
            self._failed += 1
            self._failures += 1
            self._last_failure = failure
            pause_s = exponential_pause_s(self._failures, MIN_BACKOFF_S, MAX_BACKOFF_S)
            if isinstance(failure, PERMANENT_ERRORS):
                pause_s = PERSISTENT_FAILURE_BACKOFF_S
            self._next_start = time.monotonic() + pause_s
        logger.warning("a pool's container could not be started: %s", failure)

    def _wait_for_end(self, slot: _Slot, container: Container) -> None:
        """Wait until a container is returned, or has failed two health checks in a row before it was lent.

        A single failure may be a stall of the machine.
        """
        failures = 0
        while True:
            with suppress(Empty):
                slot.ended.get(timeout=IDLE_INTERVAL_S)
                return
            if slot.phase == "used" or healthy(container, HEALTH_TIMEOUT_S):
                failures = 0
                continue
            failures += 1
            with self._changed:
                if failures >= 2 and slot.phase == "ready":
                    slot.phase = "leaving"
                    return

    def _remove(self, slot: _Slot, container: Container) -> None:
        """Remove a container, and try again until that succeeds."""
        with self._changed:
            slot.phase = "leaving"
        failures = 0
        while True:
            try:
                container.remove()
                break
            except Exception as error:
                if not failures:
                    logger.warning("a pool's container could not be removed, and will be: %s", error)
                with self._changed:
                    self._last_failure = error
            failures += 1
            time.sleep(exponential_pause_s(failures, MIN_BACKOFF_S, MAX_BACKOFF_S))
        with self._changed:
            slot.container, slot.phase = None, "missing"
            if failures:
                self._last_failure = None
            self._changed.notify_all()


def healthy(container: Container, timeout_s: float) -> bool:
    """Whether a container's server reports within `timeout_s` seconds that it is healthy."""
    return health_of(urlsplit(container.url).port or 80, timeout_s, container.options.token) is None
