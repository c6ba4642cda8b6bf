"""Who keeps the pool full: its stock, and the task that starts and removes containers."""

import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Generic, Protocol, Self, TypeVar

from openenv_core.errors import ConfigurationError, ImageNotFoundError, OptionUnavailableError, ProviderError


class PoolError(ProviderError):
    """The pool hands out nothing any more."""


class PoolClosedError(PoolError):
    """The pool was closed."""


class PoolTimeoutError(PoolError, TimeoutError):
    """No container was free in time. The pool goes on.

    Attributes:
        last_failure: What the last start that failed failed of; None where all succeeded.
    """

    def __init__(self, message: str, last_failure: BaseException | None = None) -> None:
        super().__init__(message)
        self.last_failure = last_failure


LASTING: Final = (ConfigurationError, ImageNotFoundError, OptionUnavailableError)
"""Failures that no wait mends."""


POLL_INTERVAL_S: Final = 0.5
"""How often whoever waits looks whether there is still somebody who makes members."""


class PoolMember(Protocol):
    """What a pool keeps warm; a `Container` is one."""

    url: str

    def remove(self) -> None:
        """End it, and leave nothing of it. May be called again after it has failed."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """How a pool stands.

    Attributes:
        size: Members that it keeps, in all.
        ready: Those that can be handed out.
        starting: Those that are being started.
        used: Those that somebody has.
        leaving: Those that are being removed, beyond the size.
        started: Starts that succeeded so far.
        failed: Starts that failed so far.
        last_failure: What the last of them failed of, if no start has succeeded since.
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
            said = str(self.last_failure).strip() or type(self.last_failure).__name__
            text += f"; {self.failed} starts failed, the last of: {said}"
        return text


@dataclass(slots=True)
class Stock:
    """The members of a pool. Everything below is under `changed`.

    Attributes:
        size: Members in all.
        changed: Notified whenever anything becomes ready, or nothing ever will.
        ready: Members that wait, the freshest last.
        used: Members that somebody has.
        leaving: Members to be removed, or under removal.
        starting: How many are being started.
        started: How many starts succeeded.
        failed: How many failed.
        failures: How many failed since one succeeded.
        last_failure: What the last failed of; None since one succeeded.
        closed: No more is handed out.
        dead: Why nobody replaces anything any more.
    """

    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    ready: deque[PoolMember] = field(default_factory=deque)
    used: dict[int, PoolMember] = field(default_factory=dict)
    leaving: list[PoolMember] = field(default_factory=list)
    starting: int = 0
    started: int = 0
    failed: int = 0
    failures: int = 0
    last_failure: BaseException | None = None
    closed: bool = False
    dead: BaseException | None = None

    @property
    def missing(self) -> int:
        """How many members are to be started."""
        return self.size - len(self.ready) - len(self.used) - self.starting

    def state(self) -> PoolState:
        """Return how it stands."""
        with self.changed:
            return PoolState(
                self.size,
                len(self.ready),
                self.starting,
                len(self.used),
                len(self.leaving),
                self.started,
                self.failed,
                self.last_failure,
            )

    def take(self, deadline: float, timeout_s: float, look: Callable[[], None]) -> PoolMember:
        """Wait for a member, and return it as one that is used.

        Args:
            deadline: Until when, in monotonic time.
            timeout_s: The whole time, for the error.
            look: Called every LOOK_S seconds; notes when there is nobody to wait for.

        Raises:
            PoolTimeoutError: None became ready in time.
            PoolClosedError: The pool was closed.
            PoolError: Whoever makes members has died.
        """
        with self.changed:
            while True:
                look()
                self._require_alive()
                if self.ready:
                    # The one that has waited longest: it is the surest to have settled.
                    member = self.ready.popleft()
                    self.used[id(member)] = member
                    return member
                self._require_hope("expected a container, got none")
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._timed_out(
                        f"expected a container within {timeout_s:g} s, got none"
                    ) from self.last_failure
                self.changed.wait(min(left_s, POLL_INTERVAL_S))

    def wait_for(self, ready: int, deadline: float, timeout_s: float, look: Callable[[], None]) -> None:
        """Wait until so many members are ready, and take none. Arguments and errors are those of `take`."""
        with self.changed:
            while len(self.ready) < ready:
                look()
                self._require_alive()
                self._require_hope(f"expected {ready} containers to be ready, got {len(self.ready)}")
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._timed_out(
                        f"expected {ready} containers to be ready within {timeout_s:g} s, got {len(self.ready)}"
                    ) from self.last_failure
                self.changed.wait(min(left_s, POLL_INTERVAL_S))

    def _require_hope(self, text: str) -> None:
        if isinstance(self.last_failure, LASTING) and not self.starting and not self.used:
            raise self._timed_out(f"{text}, and no wait will bring one") from self.last_failure

    def _require_alive(self) -> None:
        if self.closed:
            raise PoolClosedError("expected an open pool, got one that was closed; make a new one")
        if self.dead is not None:
            raise PoolError(
                f"expected a pool that replaces what is used, but its thread died of "
                f"{type(self.dead).__name__}: {self.dead}; close it and make a new one"
            ) from self.dead

    def _timed_out(self, text: str) -> PoolTimeoutError:
        state = self.state()  # the condition's lock can be taken again by its holder
        hint = "give containers back, or raise size or timeout_s"
        return PoolTimeoutError(
            f"{text}: {state}; {'see the failure' if state.last_failure else hint}", state.last_failure
        )


logger = logging.getLogger("openenv_core")

IDLE_INTERVAL_S: Final = 1.0
"""How often the keeper looks after members that wait, and retries what failed."""

HEALTH_TIMEOUT_S: Final = 1.0
"""How long a member that waits may take to say that it is healthy."""

MIN_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0
"""Pauses between starts that fail. An engine that restarts is met again within the last."""

REMOVE_RETRY_INTERVAL_S: Final = 0.2
"""The pause after a removal that failed."""

PERSISTENT_FAILURE_BACKOFF_S: Final = 30.0
"""The same for failures that need somebody to do something: an image to be built."""


CLEAR_TIMEOUT_S: Final = 60.0
"""How long a pool that is closed tries to remove its members. The companion of containers goes on after that."""

CLEAR_POLL_INTERVAL_S: Final = 0.05


class Start(Protocol):
    """Makes a member and returns once it is healthy; raises when `stopping` is set meanwhile, or later."""

    def __call__(self, stopping: threading.Event) -> PoolMember:
        """Make one."""


class PoolKeeper:
    """The thread that keeps a pool full, and its helpers: one thread a start, one a removal.

    At most `max_starting` starts and `size` removals run at once. The threads are daemons, and none of them
    knows the pool: one that is forgotten is closed when it is collected.

    Args:
        stock: What it keeps.
        start: Makes a member.
        healthy: Whether a member can be used, asked of those that wait.
        max_starting: Starts at once.
    """

    def __init__(
        self, stock: Stock, start: Start, healthy: Callable[[PoolMember, float], bool], max_starting: int
    ) -> None:
        self._stock = stock
        self._start = start
        self._healthy = healthy
        self._max_starting = max_starting
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._wake: SimpleQueue[PoolMember | None] = SimpleQueue()  # its put may be called from a finalizer
        self._next_start = 0.0
        self._next_look = time.monotonic() + IDLE_INTERVAL_S
        self._removing: set[int] = set()
        self._silent: set[int] = set()
        self._thread = threading.Thread(target=self._main, name="openenv-pool", daemon=True)
        self._thread.start()

    def give_back(self, member: PoolMember) -> None:
        """Take a used member back, to be removed and replaced. Never blocks."""
        self._wake.put(member)

    def require_alive(self) -> None:
        """Note the thread's death, so that those who wait are told."""
        if not self._thread.is_alive() and self._stock.dead is None and not self._stock.closed:
            self._stock.dead = RuntimeError(
                "it is not there" if os.getpid() == self._pid else "this process is a fork of the pool's"
            )

    def abandon(self) -> None:
        """Start nothing more, and let the thread remove every member. Does not wait; for finalizers too."""
        if os.getpid() != self._pid:
            return
        self._stopping.set()
        self._wake.put(None)

    def close(self, timeout_s: float) -> list[PoolMember]:
        """Start nothing more, remove every member, and return those that could not be removed in time.

        Does nothing in a fork of the process that has the pool.
        """
        if os.getpid() != self._pid:
            return []
        self.abandon()
        deadline = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        self._clear(deadline)  # all that is left where the thread has died, or has not come to it
        with self._stock.changed:
            return list(self._stock.leaving)

    def _main(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
                self._sleep()
            self._clear(time.monotonic() + CLEAR_TIMEOUT_S)
        except BaseException as error:
            with self._stock.changed:
                self._stock.dead = error
                self._stock.changed.notify_all()
            logger.exception("the keeper of a pool has died; close the pool and make a new one")

    def _clear(self, deadline: float) -> None:
        """Remove every member, those included whose start comes to its end meanwhile."""
        stock = self._stock
        with stock.changed:
            stock.closed = True
            stock.changed.notify_all()
        while True:
            with stock.changed:
                self._drain()
                stock.leaving += [*stock.ready, *stock.used.values()]
                stock.ready.clear()
                stock.used.clear()
            self._remove_some(deadline)
            with stock.changed:
                if not (stock.leaving or stock.starting) or time.monotonic() >= deadline:
                    return
                stock.changed.wait(CLEAR_POLL_INTERVAL_S)

    def _turn(self) -> None:
        stock, now = self._stock, time.monotonic()
        with stock.changed:
            self._drain()
        self._remove_some()
        with stock.changed:
            starts = self._startable() if now >= self._next_start else 0
            stock.starting += starts
        for begun in range(starts):
            try:
                self._helper(self._start_one, "openenv-pool-start")
            except RuntimeError as error:  # no thread is to be had, at the interpreter's exit for one
                with stock.changed:
                    stock.starting -= starts - begun
                    self._note_failure(error)
                break
        if now >= self._next_look:
            self._look_after_waiting()
            self._next_look = time.monotonic() + IDLE_INTERVAL_S

    def _startable(self) -> int:
        """Return how many starts there may be beside those under way; under the lock."""
        stock = self._stock
        if len(stock.leaving) >= stock.size:
            return 0  # an engine that removes nothing would fill up
        most = 1 if stock.failures else self._max_starting  # one is enough to find out
        return max(0, min(stock.missing, most - stock.starting))

    def _sleep(self) -> None:
        until = self._next_look
        with self._stock.changed:
            waiting = self._startable() > 0
        if waiting:
            until = min(until, max(self._next_start, time.monotonic() + 0.01))
        with suppress(Empty):
            member = self._wake.get(timeout=max(0.0, until - time.monotonic()))
            if member is not None:
                with self._stock.changed:
                    self._taken_back(member)

    def _drain(self) -> None:
        """Take in what was given back; under the lock."""
        with suppress(Empty):
            while True:
                member = self._wake.get_nowait()
                if member is not None:
                    self._taken_back(member)

    def _taken_back(self, member: PoolMember) -> None:
        if self._stock.used.pop(id(member), None) is not None:
            self._stock.leaving.append(member)

    def _remove_some(self, deadline: float = math.inf) -> None:
        """Begin to remove what is to go; not under the lock. What failed is tried again at a later turn."""
        stock = self._stock
        with stock.changed:
            waiting = [member for member in stock.leaving if id(member) not in self._removing]
            chosen = waiting[: max(0, stock.size - len(self._removing))]
            self._removing.update(map(id, chosen))
        for member in chosen:
            try:
                self._helper(partial(self._remove_one, member), "openenv-pool-remove")
            except RuntimeError:  # no thread is to be had, at the interpreter's exit for one: one by one then
                if time.monotonic() < deadline:
                    self._remove_one(member)
                else:
                    with stock.changed:
                        self._removing.discard(id(member))

    def _start_one(self) -> None:
        stock = self._stock
        member: PoolMember | None = None
        failure: BaseException | None = None
        try:
            member = self._start(self._stopping)
        except BaseException as error:
            failure = error
        with stock.changed:
            stock.starting -= 1
            if member is not None:
                stock.started += 1
                stock.failures, stock.last_failure = 0, None
                (stock.leaving if stock.closed else stock.ready).append(member)
            elif not stock.closed:
                self._note_failure(failure)
            stock.changed.notify_all()
        self._wake.put(None)

    def _note_failure(self, failure: BaseException | None) -> None:
        """Take down that a start failed; under the lock."""
        stock = self._stock
        stock.failed += 1
        stock.failures += 1
        stock.last_failure = failure
        self._next_start = time.monotonic() + self._pause_s(failure)
        logger.warning("a pool's container could not be started: %s", failure)

    def _pause_s(self, failure: BaseException | None) -> float:
        if isinstance(failure, LASTING):
            return PERSISTENT_FAILURE_BACKOFF_S
        return float(min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** min(self._stock.failures - 1, 10)))

    def _remove_one(self, member: PoolMember) -> None:
        failure: BaseException | None = None
        try:
            member.remove()
        except BaseException as error:
            failure = error
        if failure is not None:
            logger.warning("a pool's container could not be removed, and will be: %s", failure)
            time.sleep(REMOVE_RETRY_INTERVAL_S)
        with self._stock.changed:
            self._removing.discard(id(member))
            if failure is None:
                self._stock.leaving[:] = [each for each in self._stock.leaving if each is not member]
            self._stock.changed.notify_all()
        self._wake.put(None)

    def _look_after_waiting(self) -> None:
        """Take out members that were silent twice: once may be the machine that stood still."""
        stock = self._stock
        with stock.changed:
            waiting = list(stock.ready)
        self._silent &= {id(member) for member in waiting}
        begin = time.monotonic()
        for member in waiting:
            # Members that hang are replaced before the next are looked at, which may hang as well.
            if self._stopping.is_set() or time.monotonic() - begin >= HEALTH_TIMEOUT_S:
                return
            if self._healthy(member, HEALTH_TIMEOUT_S):
                self._silent.discard(id(member))
                continue
            if id(member) not in self._silent:
                self._silent.add(id(member))
                continue
            with stock.changed:
                if any(each is member for each in stock.ready):
                    stock.ready.remove(member)
                    stock.leaving.append(member)
                    self._wake.put(None)  # it is replaced at once

    def _helper(self, work: Callable[[], None], name: str) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()


MemberT = TypeVar("MemberT", bound=PoolMember)


class PoolLease(Generic[MemberT]):
    """A container that is one caller's until it is closed; nobody gets it after that.

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
            raise PoolError(
                "expected a container that is this lease's, got one that was given back; take another lease"
            )
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
