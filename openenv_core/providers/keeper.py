"""Keeps a pool full: its members, and the thread that starts, checks and removes them."""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from openenv_core.backoff import exponential_pause_s
from openenv_core.errors import ConfigurationError, ImageNotFoundError, OptionUnavailableError, ProviderError
from openenv_core.providers.base import health_of

logger = logging.getLogger("openenv_core")


class PoolError(ProviderError):
    """The pool can lend no more members."""


class PoolClosedError(PoolError):
    """The pool was closed."""


class PoolTimeoutError(PoolError, TimeoutError):
    """No container was free in time. The pool continues.

    Attributes:
        last_failure: Exception of the last failed start; None if no start has failed since the last success.
    """

    def __init__(self, message: str, last_failure: BaseException | None = None) -> None:
        super().__init__(message)
        self.last_failure = last_failure


class PoolMember(Protocol):
    """What a pool keeps warm, for example a `Container`."""

    url: str

    def remove(self) -> None:
        """Stop the member and remove it completely. Called again if it fails."""


MemberT = TypeVar("MemberT", bound=PoolMember)


@dataclass(frozen=True, slots=True)
class PoolState:
    """The state of a pool.

    Attributes:
        size: Number of members to keep, including lent ones.
        ready: Number of members ready to lend.
        starting: Number of members being started.
        used: Number of lent members.
        leaving: Number of members being removed, not counted in `size`.
        started: Number of successful starts.
        failed: Number of failed starts.
        last_failure: Exception of the last failed start, unless a start has succeeded since.
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
            text += f"; {self.failed} starts failed, the last of: {reason}"
        return text


PERMANENT_ERRORS: Final = (ConfigurationError, ImageNotFoundError, OptionUnavailableError)
"""Errors that waiting does not fix."""

POLL_INTERVAL_S: Final = 0.5
"""How often a waiting caller checks that the keeper's thread is alive."""

IDLE_INTERVAL_S: Final = 1.0
"""How often the keeper checks the health of ready members, and retries failures."""

HEALTH_TIMEOUT_S: Final = 1.0
"""Timeout of a ready member's health check."""

MIN_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0
"""Range of the pauses after failed starts; after an engine's restart, starts resume within the longest."""

PERSISTENT_FAILURE_BACKOFF_S: Final = 30.0
"""Pause after errors that the user must fix, such as a missing image."""

REMOVE_RETRY_INTERVAL_S: Final = 0.2
"""Pause after a failed removal."""

CLEAR_TIMEOUT_S: Final = 60.0
"""How long a closed pool tries to remove its members. The companion removes remaining containers."""

CLEAR_POLL_INTERVAL_S: Final = 0.05


class PoolKeeper(Generic[MemberT]):
    """The members of a pool, the thread that keeps it full, and a helper thread per start and per removal.

    At most `max_starting` starts and `size` removals run at once. The threads are daemons and hold no reference to the
    pool, so that an unclosed pool is closed when it is garbage-collected.
    """

    def __init__(self, start: Callable[[threading.Event], MemberT], size: int, max_starting: int) -> None:
        self._start = start
        self._size = size
        self._max_starting = max_starting
        # Protects everything in this block; notified when a member is ready, and at failures and the end.
        self.changed = threading.Condition()
        self._ready: deque[MemberT] = deque()  # oldest first
        self._used: dict[int, MemberT] = {}
        self._leaving: list[MemberT] = []  # to be removed, or being removed
        self._removing: set[int] = set()
        self._starting = self._started = self._failed = 0
        self._failures = 0  # since the last successful start
        self._last_failure: BaseException | None = None
        self._closed = False
        self._dead: BaseException | None = None  # the exception that ended the thread
        self._stopping = threading.Event()
        self._wake: SimpleQueue[MemberT | None] = SimpleQueue()  # its put may be called from a finalizer
        self._next_start = 0.0
        self._next_look = time.monotonic() + IDLE_INTERVAL_S
        self._silent: set[int] = set()
        self._pid: int | None = None
        self._thread = threading.Thread(target=self._main, name="openenv-pool", daemon=True)

    def run(self) -> None:
        """Start to fill the pool. Idempotent. Raises `PoolClosedError` if it is closed."""
        with self.changed:
            self._require_open()
            if self._pid is None:
                self._pid = os.getpid()
                self._thread.start()

    def state(self) -> PoolState:
        """Return the state of the pool."""
        with self.changed:
            return PoolState(
                self._size,
                len(self._ready),
                self._starting,
                len(self._used),
                len(self._leaving),
                self._started,
                self._failed,
                self._last_failure,
            )

    def wait(
        self,
        ready: int,
        wanted: str,
        deadline: float,
        timeout_s: float,
        stopping: threading.Event | None = None,
    ) -> None:
        """Wait until `ready` members are ready. The caller holds the lock.

        Raises:
            PoolTimeoutError: They were not ready in time, or will never be.
            PoolError: The pool was closed, its thread has died, or `stopping` was set.
        """
        while True:
            if stopping is not None and stopping.is_set():
                raise PoolError("expected a container, but its taker was stopped meanwhile")
            self._require_open()
            self._require_thread()
            if len(self._ready) >= ready:
                return
            left_s = deadline - time.monotonic()
            reason = ""
            if isinstance(self._last_failure, PERMANENT_ERRORS) and not self._starting and not self._used:
                reason = f"expected {wanted}, got {len(self._ready)}, and no wait will bring one"
            elif left_s <= 0:
                reason = f"expected {wanted} within {timeout_s:g} s, got {len(self._ready)}"
            if reason:
                failure = self._last_failure
                hint = "see the failure" if failure else "give containers back, or raise size or timeout_s"
                raise PoolTimeoutError(f"{reason}: {self.state()}; {hint}", failure) from failure
            self.changed.wait(min(left_s, POLL_INTERVAL_S))

    def take(self, deadline: float, timeout_s: float, stopping: threading.Event | None) -> MemberT:
        """Wait for a member and lend it. Arguments and errors as for `wait`."""
        with self.changed:
            self.wait(1, "a container", deadline, timeout_s, stopping)
            # The oldest, because it is the most likely to have settled.
            member = self._ready.popleft()
            self._used[id(member)] = member
            return member

    def give_back(self, member: MemberT) -> None:
        """Return a lent member, to be removed and replaced. Never blocks."""
        self._wake.put(member)

    def abandon(self) -> None:
        """Stop starting members and let the thread remove all. Does not wait; safe in finalizers."""
        if os.getpid() == self._pid:
            self._stopping.set()
            self._wake.put(None)

    def close(self, timeout_s: float) -> int:
        """Stop starting members, remove all, and return how many could not be removed in time.

        Removes nothing in a fork of the pool's process.
        """
        with self.changed:
            self._closed = True
        if os.getpid() != self._pid:
            return 0
        self.abandon()
        deadline = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        self._clear(deadline)  # removes the rest if the thread has died or not finished
        with self.changed:
            return len(self._leaving)

    def _require_open(self) -> None:
        if self._closed:
            raise PoolClosedError("expected an open pool, got one that was closed; make a new one")

    def _require_thread(self) -> None:
        dead = self._dead
        if dead is None and not self._thread.is_alive():
            same_process = os.getpid() == self._pid
            dead = RuntimeError("it is not there" if same_process else "this process is a fork of the pool's")
        if dead is not None:
            raise PoolError(
                f"expected a pool that replaces what is used, but its thread died of "
                f"{type(dead).__name__}: {dead}; close it and make a new one"
            ) from dead

    def _main(self) -> None:
        try:
            while not self._stopping.is_set():
                self._run_once()
                self._sleep()
            self._clear(time.monotonic() + CLEAR_TIMEOUT_S)
        except BaseException as error:
            with self.changed:
                self._dead = error
                self.changed.notify_all()
            logger.exception("the keeper of a pool has died; close the pool and make a new one")

    def _clear(self, deadline: float) -> None:
        """Remove all members, including those whose start finishes meanwhile."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        while True:
            with self.changed:
                self._drain()
                self._leaving += [*self._ready, *self._used.values()]
                self._ready.clear()
                self._used.clear()
            self._remove_some(deadline)
            with self.changed:
                if not (self._leaving or self._starting) or time.monotonic() >= deadline:
                    return
                self.changed.wait(CLEAR_POLL_INTERVAL_S)

    def _run_once(self) -> None:
        now = time.monotonic()
        with self.changed:
            self._drain()
        self._remove_some()
        with self.changed:
            starts = self._startable() if now >= self._next_start else 0
            self._starting += starts
        for submitted in range(starts):
            try:
                _start_thread(self._start_one, "openenv-pool-start")
            except RuntimeError as error:  # no thread can start, for example at interpreter exit
                with self.changed:
                    self._starting -= starts - submitted
                    self._note_failure(error)
                break
        if now >= self._next_look:
            self._check_ready()
            self._next_look = time.monotonic() + IDLE_INTERVAL_S

    def _startable(self) -> int:
        """Return how many further starts are allowed. The caller holds the lock."""
        if len(self._leaving) >= self._size:
            return 0  # do not fill up an engine that cannot remove containers
        missing = self._size - len(self._ready) - len(self._used) - self._starting
        most = 1 if self._failures else self._max_starting  # after a failure, one start is enough to probe
        return max(0, min(missing, most - self._starting))

    def _sleep(self) -> None:
        until = self._next_look
        with self.changed:
            if self._startable() > 0:
                until = min(until, max(self._next_start, time.monotonic() + 0.01))
        with suppress(Empty):
            member = self._wake.get(timeout=max(0.0, until - time.monotonic()))
            with self.changed:
                self._take_back(member)

    def _drain(self) -> None:
        """Process returned members. The caller holds the lock."""
        with suppress(Empty):
            while True:
                self._take_back(self._wake.get_nowait())

    def _take_back(self, member: MemberT | None) -> None:
        if member is not None and self._used.pop(id(member), None) is not None:
            self._leaving.append(member)

    def _remove_some(self, deadline: float = math.inf) -> None:
        """Start removals. The caller does not hold the lock. Failed removals are retried later."""
        with self.changed:
            waiting = [member for member in self._leaving if id(member) not in self._removing]
            chosen = waiting[: max(0, self._size - len(self._removing))]
            self._removing.update(map(id, chosen))
        for member in chosen:
            try:
                _start_thread(partial(self._remove_one, member), "openenv-pool-remove")
            except RuntimeError:  # no thread can start, for example at interpreter exit: remove one by one
                if time.monotonic() < deadline:
                    self._remove_one(member)
                else:
                    with self.changed:
                        self._removing.discard(id(member))

    def _start_one(self) -> None:
        member: MemberT | None = None
        failure: BaseException | None = None
        try:
            member = self._start(self._stopping)
        except BaseException as error:
            failure = error
        with self.changed:
            self._starting -= 1
            if member is not None:
                self._started += 1
                self._failures, self._last_failure = 0, None
                (self._leaving if self._closed else self._ready).append(member)
            elif failure is not None and not self._closed:
                self._note_failure(failure)
            self.changed.notify_all()
        self._wake.put(None)

    def _note_failure(self, failure: BaseException) -> None:
        """Record a failed start. The caller holds the lock."""
        self._failed += 1
        self._failures += 1
        self._last_failure = failure
        pause_s = exponential_pause_s(self._failures, MIN_BACKOFF_S, MAX_BACKOFF_S)
        if isinstance(failure, PERMANENT_ERRORS):
            pause_s = PERSISTENT_FAILURE_BACKOFF_S
        self._next_start = time.monotonic() + pause_s
        logger.warning("a pool's container could not be started: %s", failure)

    def _remove_one(self, member: MemberT) -> None:
        failure: BaseException | None = None
        try:
            member.remove()
        except BaseException as error:
            failure = error
            logger.warning("a pool's container could not be removed, and will be: %s", failure)
            time.sleep(REMOVE_RETRY_INTERVAL_S)
        with self.changed:
            self._removing.discard(id(member))
            if failure is None:
                self._leaving[:] = [each for each in self._leaving if each is not member]
            self.changed.notify_all()
        self._wake.put(None)

    def _check_ready(self) -> None:
        """Remove members that failed two health checks in a row: a single failure may be a stall of the machine."""
        with self.changed:
            waiting = list(self._ready)
        self._silent &= {id(member) for member in waiting}
        begin = time.monotonic()
        for member in waiting:
            # Replace hanging members before checking the others, which may hang as well.
            if self._stopping.is_set() or time.monotonic() - begin >= HEALTH_TIMEOUT_S:
                return
            if healthy(member, HEALTH_TIMEOUT_S):
                self._silent.discard(id(member))
            elif id(member) not in self._silent:
                self._silent.add(id(member))
            else:
                with self.changed:
                    if any(each is member for each in self._ready):
                        self._ready.remove(member)
                        self._leaving.append(member)
                        self._wake.put(None)  # replace it at once


def _start_thread(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


def healthy(member: PoolMember, timeout_s: float) -> bool:
    """Whether a member reports within `timeout_s` seconds that it is healthy."""
    options = getattr(member, "options", None)  # a container's server may require a token
    token = None if options is None else options.token
    return health_of(urlsplit(member.url).port or 80, timeout_s, token) is None
