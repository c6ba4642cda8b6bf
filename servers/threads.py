"""A pool of threads for blocking calls: one thread drains the queue, and others help if calls take long.

Waking a thread for each call, and the event loop after it, costs several times as much as a short call. So one thread
runs the calls that are queued, one after the other, and all that have ended when the event loop looks are delivered
together. Calls behind a long one get other threads: at once if the previous calls took long too, otherwise within a
few milliseconds.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from openenv_core.protocol.errors import text_of

logger = logging.getLogger("servers")

MAX_THREADS: Final = 1024
"""Greatest number of threads of one pool while their calls wait for something."""

MAX_COMPUTING: Final = 64
"""Greatest number of threads of one pool while the process computes: more would only share the cores."""

_LONG_S: Final = 0.0005
"""Duration in seconds above which a call justifies waking another thread for the next one."""

_CHECK_INTERVAL_S: Final = 0.001
_MAX_CHECK_INTERVAL_S: Final = 0.016
"""Seconds between two checks of the running calls while others wait; doubled after each that wakes no thread."""

_COMPUTING_CORES: Final = 0.5
"""Busy cores above which the process counts as computing, and below which as waiting for something."""

_IDLE_S: Final = 10.0
"""Seconds without a call after which a thread ends."""

_PIDS_LIMITS: Final = ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max")

Outcome: TypeAlias = tuple[bool, Any]
"""(True, the result) or (False, the exception)."""


def max_threads() -> int:
    """Return how many threads a pool may have: a quarter of the container's limit, at most MAX_THREADS."""
    for path in _PIDS_LIMITS:
        with suppress(OSError, ValueError):
            return max(1, min(MAX_THREADS, int(Path(path).read_text(encoding="ascii")) // 4))
    return MAX_THREADS


def contain(error: BaseException) -> Exception:
    """Return an `Exception` in place of a `BaseException` that would end more than the call that raised it.

    Examples are panics of compiled libraries, and interrupts and cancellations that an environment itself raises.
    """
    contained = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    contained.__cause__ = error
    return contained


def containable(error: BaseException) -> Exception | SystemExit:
    """Return an exception of a call as its outcome has it: itself, or what contains it."""
    # Neither a coroutine nor a future can raise a StopIteration.
    if isinstance(error, Exception | SystemExit) and not isinstance(error, StopIteration):
        return error
    return contain(error)


def outcome_of(fn: Callable[..., Any], *args: Any) -> Outcome:
    """Call a function and return its outcome."""
    try:
        return True, fn(*args)
    except BaseException as error:
        return False, containable(error)


class _Mailbox:
    """Outcomes on their way from threads to one event loop, which takes all that are there with one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.dispatch_scheduled = self.check_scheduled = False
        self._outcomes: deque[tuple[ThreadCall, Outcome]] = deque()
        self._wakeup_scheduled = False

    def post(self, call: "ThreadCall", outcome: Outcome) -> None:
        """Send an outcome; from any thread."""
        self._outcomes.append((call, outcome))
        if not self._wakeup_scheduled:  # a wake-up still to come delivers this one too
            self._wake_loop()

    def _wake_loop(self) -> None:
        self._wakeup_scheduled = True
        with suppress(RuntimeError):  # a closed loop: nothing waits for the outcomes any more
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._wakeup_scheduled = False
        outcomes = self._outcomes
        try:
            while outcomes:
                call, outcome = outcomes.popleft()
                call.settle(outcome)
        finally:
            if outcomes and not self._wakeup_scheduled:  # a callback has raised, which the event loop reports
                self._wake_loop()


class ThreadCall:
    """One call that waits for a thread or runs in one; subclasses take its outcome.

    Attributes:
        work: The function to call.
        args: Its arguments.
        mailbox: Delivers the outcome.
        started: Whether a thread has started it; guarded by the pool's lock, like the next two.
        thread: The thread that runs it.
        abandoned: Whether no thread is to start it, or the thread that runs it has been replaced.
    """

    __slots__ = ("abandoned", "args", "mailbox", "started", "thread", "work")

    work: Callable[..., Any]
    args: tuple[Any, ...]
    mailbox: _Mailbox
    started: bool
    thread: "_Thread | None"
    abandoned: bool

    def settle(self, outcome: Outcome) -> None:
        """Take the outcome, on the event loop."""
        raise NotImplementedError


class _FunctionCall(ThreadCall):
    """A call whose outcome a callback takes."""

    __slots__ = ("_on_outcome",)

    def __init__(self, work: Callable[[], Any], on_outcome: Callable[[Outcome], None]) -> None:
        self.work = work
        self.args = ()
        self._on_outcome = on_outcome

    def settle(self, outcome: Outcome) -> None:
        self._on_outcome(outcome)


class _Thread(threading.Thread):
    """A thread of a pool.

    Attributes:
        call: The call that it runs, if any.
        call_started_at: When that call started.
        wake_lock: Lock that is held while the thread is idle.
    """

    def __init__(self, pool: "ThreadPool", name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._pool = pool
        self.call: ThreadCall | None = None
        self.call_started_at = 0.0
        self.wake_lock = threading.Lock()
        self.wake_lock.acquire()

    def run(self) -> None:
        while (call := self._pool.next_call(self)) is not None:
            call.mailbox.post(call, outcome_of(call.work, *call.args))
            del call  # an idle thread must not keep what the call refers to alive


class ThreadPool:
    """At most `size` daemon threads, started as needed and ended when idle for `_IDLE_S`.

    The standard pool joins its threads when the interpreter exits, so one hung step would keep a server from
    ever stopping; it creates two futures for every call, and wakes a thread and the event loop for it.

    Calls start in the order of submission. The callers bound the queue: a session has one call at a time, and sessions
    are capped. The thread of a pool of one lives as long as the pool, since its users rely on thread-local state.
    """

    def __init__(self, size: int, name: str = "environment") -> None:
        self.size = size
        self._name = name
        self._mailbox: _Mailbox | None = None
        self._queue: deque[ThreadCall] = deque()
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._threads = self._started = 0
        self._idle_threads: list[_Thread] = []
        self._draining_threads: set[_Thread] = set()  # at work, and not known to be in a long call
        self._long_calls = 0  # length of the current run of long calls
        self._closed = self._start_failed = False

    def submit(self, fn: Callable[[], Any], on_outcome: Callable[[Outcome], None]) -> ThreadCall:
        """Queue the call of a function, as `enqueue`; `on_outcome` takes its outcome."""
        call = _FunctionCall(fn, on_outcome)
        self.enqueue(call)
        return call

    def enqueue(self, call: ThreadCall) -> None:
        """Queue a call, from a running event loop, on which its outcome is delivered."""
        mailbox = self._mailbox
        loop = asyncio.get_running_loop()
        if mailbox is None or mailbox.loop is not loop:
            mailbox = self._mailbox = _Mailbox(loop)
        call.mailbox, call.thread = mailbox, None
        call.started = call.abandoned = False
        self._closed = False
        self._queue.append(call)
        if not mailbox.dispatch_scheduled:
            mailbox.dispatch_scheduled = True
            loop.call_soon(self._dispatch, mailbox)

    async def run(self, fn: Callable[[], Any]) -> Outcome:
        """Queue a call, and return its outcome."""
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.submit(fn, lambda value: None if outcome.done() else outcome.set_result(value))
        return await outcome

    def abort(self, call: ThreadCall, replace: bool = True) -> bool:
        """Abandon a call, or dequeue it if it has not started.

        Args:
            call: The call.
            replace: Whether another thread replaces the one that the call occupies, which then ends with the call.

        Returns:
            Whether the call has started, so that its outcome is still delivered.
        """
        with self._lock:
            if not call.started:
                call.abandoned = True
                return False
            if call.thread is None or not replace:
                return True
            call.abandoned = True
            self._threads -= 1
            self._draining_threads.discard(call.thread)
        return True  # the check of the calls that wait wakes another thread for them

    def close(self) -> None:
        """Let every thread end after the calls already queued, without waiting for them.

        A later call starts new threads: an app may be served again after its server has stopped.
        """
        with self._lock:
            self._closed = True
            idle_threads, self._idle_threads = self._idle_threads, []
        for thread in idle_threads:
            thread.wake_lock.release()

    def next_call(self, thread: _Thread) -> ThreadCall | None:
        """Return a thread's next call, or None if the thread is to end; called by the threads."""
        ended, thread.call = thread.call, None
        while True:
            with self._lock:
                now = time.monotonic()
                if ended is not None:
                    ended.thread = None
                    self._long_calls = self._long_calls + 1 if now - thread.call_started_at > _LONG_S else 0
                    if ended.abandoned:
                        return None
                    ended = None
                # Threads leave the set before they find the queue empty for the last time, and `submit` adds to the
                # queue before it looks at the set: no call is left to a thread that rests.
                self._draining_threads.discard(thread)
                while self._queue:
                    self._draining_threads.add(thread)
                    if (call := self._queue.popleft()).abandoned:
                        continue
                    call.started = True
                    call.thread, thread.call, thread.call_started_at = thread, call, now
                    return call
                self._draining_threads.discard(thread)
                if self._closed:
                    self._threads -= 1
                    return None
                self._idle_threads.append(thread)
            if not thread.wake_lock.acquire(timeout=_IDLE_S if self.size > 1 else -1):
                with self._lock:
                    if thread in self._idle_threads:
                        self._idle_threads.remove(thread)
                        self._threads -= 1
                        return None
                thread.wake_lock.acquire()  # it was woken just as its wait timed out

    def _dispatch(self, mailbox: _Mailbox) -> None:
        """Wake a thread for the calls of one turn of the event loop if none is at work; one each if they are long."""
        mailbox.dispatch_scheduled = False
        queued = len(self._queue)
        if self._long_calls > 1:
            queued -= self._wake(queued, MAX_COMPUTING)
        elif queued and not self._draining_threads:
            queued -= self._wake(1, MAX_COMPUTING)
        if queued and not mailbox.check_scheduled:
            self._schedule_check(mailbox, _CHECK_INTERVAL_S)

    def _wake(self, count: int, limit: int) -> int:
        """Wake up to `count` threads, with at most `limit` at work; return how many."""
        to_wake: list[_Thread] = []
        with self._lock:
            free = min(limit, self.size) - (self._threads - len(self._idle_threads))
            for _ in range(min(count, free)):
                if self._idle_threads:
                    thread = self._idle_threads.pop()
                else:
                    self._threads += 1
                    self._started += 1
                    thread = _Thread(self, f"{self._name}-{self._started}")
                self._draining_threads.add(thread)
                to_wake.append(thread)
        started = len(to_wake)
        for thread in to_wake:
            if thread.ident is not None:
                thread.wake_lock.release()
                continue
            try:
                thread.start()
                self._start_failed = False
            except RuntimeError as error:
                started -= 1
                with self._lock:
                    self._threads -= 1
                    self._draining_threads.discard(thread)
                if not self._start_failed:  # logged once; each check tries again
                    self._start_failed = True
                    logger.error(
                        "cannot start a thread beside %d others: %s; calls wait", self._threads, error
                    )
        return started

    def _schedule_check(self, mailbox: _Mailbox, pause_s: float) -> None:
        mailbox.check_scheduled = True
        began = (time.monotonic(), time.process_time())
        mailbox.loop.call_later(pause_s, self._check_calls, mailbox, pause_s, *began)

    def _check_calls(self, mailbox: _Mailbox, pause_s: float, began: float, cpu_began: float) -> None:
        """Wake more threads for calls that wait behind long ones, twice as many each time while those wait too."""
        mailbox.check_scheduled = False
        if not self._queue:
            return
        now = time.monotonic()
        waits = time.process_time() - cpu_began < _COMPUTING_CORES * (now - began)
        with self._lock:
            self._draining_threads = {
                thread
                for thread in self._draining_threads
                if thread.call is None or now - thread.call_started_at <= _LONG_S
            }
            busy = self._threads - len(self._idle_threads)
            count = 0 if self._draining_threads else max(1, busy) if waits else 1
        woken = self._wake(min(count, len(self._queue)), self.size if waits else MAX_COMPUTING)
        self._schedule_check(mailbox, _CHECK_INTERVAL_S if woken else min(2 * pause_s, _MAX_CHECK_INTERVAL_S))
