"""Keeps a pool full: starts what is missing, removes what was used, and looks after what waits."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from openenv_core.providers.pool.stock import LASTING, Member, Stock

logger = logging.getLogger("openenv_core")

IDLE_S: Final = 1.0
"""How often the keeper looks after members that wait, and retries what failed."""

HEALTH_S: Final = 1.0
"""How long a member that waits may take to say that it is healthy."""

FIRST_PAUSE_S: Final = 0.1
LAST_PAUSE_S: Final = 5.0
"""Pauses between starts that fail. An engine that restarts is met again within the last."""

REMOVE_PAUSE_S: Final = 0.2
"""The pause after a removal that failed."""

LASTING_PAUSE_S: Final = 30.0
"""The same for failures that need somebody to do something: an image to be built."""


CLEAR_S: Final = 60.0
"""How long a pool that is closed tries to remove its members. The companion of containers goes on after that."""

CLEAR_LOOK_S: Final = 0.05


class Start(Protocol):
    """Makes a member and returns once it is healthy; raises when `stopping` is set meanwhile, or later."""

    def __call__(self, stopping: threading.Event) -> Member:
        """Make one."""


class Keeper:
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
        self, stock: Stock, start: Start, healthy: Callable[[Member, float], bool], max_starting: int
    ) -> None:
        self._stock = stock
        self._start = start
        self._healthy = healthy
        self._max_starting = max_starting
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._wake: SimpleQueue[Member | None] = SimpleQueue()  # its put may be called from a finalizer
        self._next_start = 0.0
        self._next_look = time.monotonic() + IDLE_S
        self._removing: set[int] = set()
        self._silent: set[int] = set()
        self._thread = threading.Thread(target=self._main, name="openenv-pool", daemon=True)
        self._thread.start()

    def give_back(self, member: Member) -> None:
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

    def close(self, timeout_s: float) -> list[Member]:
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
            self._clear(time.monotonic() + CLEAR_S)
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
                stock.changed.wait(CLEAR_LOOK_S)

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
            self._next_look = time.monotonic() + IDLE_S

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

    def _taken_back(self, member: Member) -> None:
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
        member: Member | None = None
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
            return LASTING_PAUSE_S
        return float(min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._stock.failures - 1, 10)))

    def _remove_one(self, member: Member) -> None:
        failure: BaseException | None = None
        try:
            member.remove()
        except BaseException as error:
            failure = error
        if failure is not None:
            logger.warning("a pool's container could not be removed, and will be: %s", failure)
            time.sleep(REMOVE_PAUSE_S)
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
            if self._stopping.is_set() or time.monotonic() - begin >= HEALTH_S:
                return
            if self._healthy(member, HEALTH_S):
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
