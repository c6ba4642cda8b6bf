"""A pool of threads for blocking calls: one thread drains the queue, and others help if calls take long.

Waking a thread for each call, and the event loop after it, costs several times as much as a short call. So calls
submitted together wake one thread, which runs them one after the other, and their outcomes are delivered together too.
If a call takes long, those behind it get other threads: at once if the previous calls took long too, otherwise within
a few milliseconds.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from openenv_core.protocol.errors import text_of

logger = logging.getLogger("servers")

MAX_THREADS: Final = 1024
"""Greatest number of threads of one pool while their calls wait for something."""

MAX_COMPUTING: Final = 64
"""Greatest number of threads of one pool while the process computes: more would only share the cores."""

_GATHERED_CALLS: Final = 64
"""Queued calls at which a thread is woken at once, instead of when no further calls are submitted."""

_LONG_S: Final = 0.0002
"""Duration in seconds above which a call justifies waking another thread for the next one."""

_CHECK_INTERVAL_S: Final = 0.001
_QUICK_CHECK_INTERVAL_S: Final = 0.004
_MAX_CHECK_INTERVAL_S: Final = 0.016
"""Seconds between two checks of the running calls while others wait; doubled after each check without effect."""

_COMPUTING_CORES: Final = 0.5
"""Busy cores above which the process counts as computing, and below which as waiting for something."""

_HOLD_S: Final = 0.0005
_BATCHED_HOLD_S: Final = 0.01
"""Seconds that outcomes are held back while their thread runs further short calls, or calls submitted together."""

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


def outcome_of(fn: Callable[[], Any]) -> Outcome:
    """Call a function and return its outcome."""
    try:
        return True, fn()
    except (Exception, SystemExit) as error:
        return False, error
    except BaseException as error:
        return False, contain(error)


class _Mailbox:
    """Callbacks from threads to one event loop, which runs all that are pending with one wake-up.

    Attributes:
        loop: The event loop.
        dispatch_scheduled: Whether `ThreadPool._dispatch` is scheduled.
        items: Pending callbacks, each with its argument.
        last_was_single: Whether at most one call was queued at the last dispatch.
        check_scheduled: Whether a check of the running calls is scheduled.
        check_scheduled_at: The wall clock and the process's CPU time when it was scheduled.
    """

    __slots__ = (
        "_wakeup_scheduled",
        "check_scheduled",
        "check_scheduled_at",
        "dispatch_scheduled",
        "items",
        "last_was_single",
        "loop",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.dispatch_scheduled = self.check_scheduled = False
        self.last_was_single = True
        self.check_scheduled_at = (0.0, 0.0)
        self.items: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._wakeup_scheduled = False

    def post(self, fn: Callable[[Any], None], value: Any) -> None:
        """Add a callback, to run after `notify` or at the next check; from any thread."""
        self.items.append((fn, value))

    def notify(self) -> None:
        """Wake the event loop if callbacks are pending; from any thread."""
        if self.items and not self._wakeup_scheduled:  # an earlier wake-up still to come runs these too
            self._wakeup_scheduled = True
            with suppress(RuntimeError):  # a closed loop: nothing waits for the outcomes any more
                self.loop.call_soon_threadsafe(self.run_callbacks)

    def run_callbacks(self) -> None:
        """Run the pending callbacks; on the event loop."""
        self._wakeup_scheduled = False
        items = self.items
        try:
            while items:
                fn, value = items.popleft()
                fn(value)
        finally:
            self.notify()  # run the rest even if one has raised, which the event loop reports


class ThreadCall:
    """One call that waits for a thread or runs in one.

    Attributes:
        mailbox: Delivers its outcome.
        outcome: The outcome, once delivered; set on the event loop only.
        on_outcome: Called on the event loop with the outcome, instead of setting `waiter`. Set it only while there is
            no outcome: a cancelled awaiter resumes a little later, and the outcome may be delivered in between.
        batched: Whether it is one of many submitted together, so that its outcome may wait for theirs.
        spent_s: Seconds that it ran; set before the outcome.
        started: Whether a thread has started it; guarded by the pool's lock, like the next two.
        thread: The thread that runs it.
        abandoned: Whether no thread is to start it, or the thread that runs it has been replaced.
    """

    __slots__ = (
        *("_fn", "_on_begin", "_result", "started", "abandoned", "mailbox", "outcome", "spent_s"),
        *("on_outcome", "thread", "batched", "waiter"),
    )

    def __init__(
        self,
        mailbox: _Mailbox,
        fn: Callable[[], Any],
        on_begin: Callable[[], None] | None,
        on_outcome: Callable[[Outcome], None] | None,
        batched: bool,
    ) -> None:
        self.mailbox = mailbox
        self.batched = batched
        self._fn = fn
        self._on_begin = on_begin
        if on_outcome is None:
            self.waiter: asyncio.Future[Outcome] = mailbox.loop.create_future()
        self.outcome: Outcome | None = None
        self.on_outcome = on_outcome
        self.thread: _Thread | None = None
        self.started = self.abandoned = False

    def __await__(self) -> Generator[None, None, Outcome]:
        """Wait for the outcome outside of a task: `on_outcome` has to resume the awaiting coroutine."""
        yield
        assert self.outcome is not None
        return self.outcome

    def run(self) -> None:
        """Run the call; called by the pool's threads."""
        if self._on_begin is not None:
            self.mailbox.post(self._begin, self._on_begin)
            self.mailbox.notify()
        self._result = outcome_of(self._fn)

    def post(self, spent_s: float) -> None:
        """Deliver the outcome; called by the pool's threads."""
        self.spent_s = spent_s
        self.mailbox.post(self._deliver, self._result)

    def _begin(self, on_begin: Callable[[], None]) -> None:
        if not self.waiter.done():
            on_begin()

    def _deliver(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self.on_outcome is not None:
            self.on_outcome(outcome)
        elif not self.waiter.done():
            self.waiter.set_result(outcome)


class _Thread(threading.Thread):
    """A thread of a pool.

    Attributes:
        call: The call that it runs, if any.
        call_started_at: When that call started.
        notified_at: When it last woke the event loop to deliver outcomes.
        wake_lock: Lock that is held while the thread is idle.
    """

    def __init__(self, pool: "ThreadPool", name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._pool = pool
        self.call: ThreadCall | None = None
        self.call_started_at = self.notified_at = 0.0
        self.wake_lock = threading.Lock()
        self.wake_lock.acquire()

    def run(self) -> None:
        while (call := self._pool.next_call(self)) is not None:
            call.run()
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
        self._idle_s = _IDLE_S if size > 1 else -1
        self._mailbox: _Mailbox | None = None
        self._queue: deque[ThreadCall] = deque()
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._threads = 0
        self._started = 0
        self._idle_threads: list[_Thread] = []
        self._draining_threads: set[_Thread] = set()  # at work, and not known to be in a long call
        self._finished_count = 0  # calls since the last check
        self._long_calls = 0  # length of the current run of long calls
        self._calls_are_short = False  # at the last check, most calls were short
        self._long_calls_wait = True  # at the last check, long calls waited for something
        self._closed = False
        self._start_failed = False

    def submit(
        self,
        fn: Callable[[], Any],
        on_begin: Callable[[], None] | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
        batched: bool = False,
    ) -> ThreadCall:
        """Queue a call, from a running event loop.

        Args:
            fn: The function to call.
            on_begin: Called on the event loop once a thread has started the call.
            on_outcome: Called on the event loop with the outcome; if None, await the call's `waiter`.
            batched: Whether other calls are submitted with it, whose outcomes its own may wait for.
        """
        loop = asyncio.get_running_loop()
        mailbox = self._mailbox
        if mailbox is None or mailbox.loop is not loop:
            mailbox = self._mailbox = _Mailbox(loop)
        call = ThreadCall(mailbox, fn, on_begin, on_outcome, batched)
        self._closed = False
        self._queue.append(call)
        if mailbox.last_was_single and not self._draining_threads:
            self._dispatch(mailbox, 1)
        elif not mailbox.dispatch_scheduled:
            mailbox.dispatch_scheduled = True
            loop.call_soon(self._dispatch, mailbox, 0)
        return call

    def abort(self, call: ThreadCall, replace: bool = True, *, started: bool = True) -> bool:
        """Abandon a call, or dequeue it if it has not started.

        Args:
            call: The call.
            replace: Whether another thread replaces the one that the call occupies, which then ends with the call.
            started: Whether to abandon the call even if it has started.

        Returns:
            Whether the call has started, so that its outcome is still delivered.
        """
        with self._lock:
            if not call.started:
                call.abandoned = True
                return False
            if call.thread is None or not replace or not started:
                return True
            call.abandoned = True
            self._threads -= 1
            self._draining_threads.discard(call.thread)
            to_wake = [] if self._draining_threads else self._activate(1, MAX_COMPUTING)
        self._wake(to_wake)
        return True

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
        """Finish a thread's call and return its next one, or None if the thread is to end; called by the threads."""
        finished_call, thread.call = thread.call, None
        now = time.monotonic()
        spent_s = now - thread.call_started_at
        is_long = spent_s > _LONG_S
        if finished_call is not None:
            finished_call.post(spent_s)
            hold_s = _BATCHED_HOLD_S if finished_call.batched else 0 if is_long else _HOLD_S
            if now - thread.notified_at > hold_s:
                thread.notified_at = now
                finished_call.mailbox.notify()
        while True:
            with self._lock:
                if finished_call is not None:
                    finished_call.thread = None
                    self._finished_count += 1
                    self._long_calls = self._long_calls + 1 if is_long else 0
                if must_end := finished_call is not None and finished_call.abandoned:
                    pass
                elif (call := self._pop_call()) is not None:
                    call.started = True
                    # Not `now`: this thread may have been idle since its previous call.
                    call.thread, thread.call, thread.call_started_at = thread, call, time.monotonic()
                    self._draining_threads.add(thread)
                    return call
                else:
                    self._draining_threads.discard(thread)
                    if must_end := self._closed:
                        self._threads -= 1
                    else:
                        self._idle_threads.append(thread)
            if finished_call is not None:
                finished_call.mailbox.notify()
            if must_end:
                return None
            finished_call = None
            if not thread.wake_lock.acquire(timeout=self._idle_s):
                with self._lock:
                    if thread in self._idle_threads:
                        self._idle_threads.remove(thread)
                        self._threads -= 1
                        return None
                thread.wake_lock.acquire()  # it was woken just as its wait timed out

    def _pop_call(self) -> ThreadCall | None:
        """Pop the first call that is not abandoned; called under the lock."""
        while self._queue:
            if not (call := self._queue.popleft()).abandoned:
                return call
        return None

    def _dispatch(self, mailbox: _Mailbox, queued_before: int) -> None:
        """Wake a thread if none is at work, or one per call if calls take long; first wait for calls to stop coming."""
        queued = len(self._queue)
        if queued_before < queued < _GATHERED_CALLS:
            mailbox.loop.call_soon(self._dispatch, mailbox, queued)
            return
        mailbox.dispatch_scheduled = False
        mailbox.last_was_single = queued < 2
        with self._lock:
            calls_are_long = self._long_calls > 1
            count = queued if calls_are_long and self._long_calls_wait else 0 if self._draining_threads else 1
            to_wake = self._activate(count, MAX_COMPUTING)
            remaining_count = len(self._queue) - len(to_wake)
            if not mailbox.check_scheduled:
                self._finished_count = 0
        self._wake(to_wake)
        # Of two threads woken, one may run both calls, and hold the first outcome back while it runs the second.
        if (
            remaining_count > 0 or len(to_wake) > 1 or mailbox.items or not self._draining_threads
        ) and not mailbox.check_scheduled:
            self._schedule_check(
                mailbox,
                _QUICK_CHECK_INTERVAL_S
                if self._calls_are_short and not calls_are_long
                else _CHECK_INTERVAL_S,
            )

    def _activate(self, count: int, limit: int) -> list[_Thread]:
        """Return up to `count` threads to wake, one per queued call, with at most `limit` at work; under the lock."""
        free_count = min(limit, self.size) - (self._threads - len(self._idle_threads))
        to_wake = []
        for _ in range(min(count, free_count, len(self._queue))):
            if self._idle_threads:
                thread = self._idle_threads.pop()
            else:
                self._threads += 1
                self._started += 1
                thread = _Thread(self, f"{self._name}-{self._started}")
            self._draining_threads.add(thread)
            to_wake.append(thread)
        return to_wake

    def _wake(self, threads: Iterable[_Thread]) -> None:
        for thread in threads:
            if thread.ident is not None:
                thread.wake_lock.release()
                continue
            try:
                thread.start()
                self._start_failed = False
            except RuntimeError as error:
                with self._lock:
                    self._threads -= 1
                    self._draining_threads.discard(thread)
                if not self._start_failed:  # logged once; each check tries again
                    self._start_failed = True
                    logger.error(
                        "cannot start a thread beside %d others: %s; calls wait", self._threads, error
                    )

    def _schedule_check(self, mailbox: _Mailbox, pause_s: float) -> None:
        mailbox.check_scheduled = True
        mailbox.check_scheduled_at = (time.monotonic(), time.process_time())
        mailbox.loop.call_later(pause_s, self._check_calls, mailbox, pause_s)

    def _check_calls(self, mailbox: _Mailbox, pause_s: float) -> None:
        """Wake more threads for calls that wait behind long ones, twice as many each time while that helps."""
        mailbox.check_scheduled = False
        mailbox.run_callbacks()  # deliver outcomes held back by a thread that is now in a long call
        now, (scheduled_at, cpu) = time.monotonic(), mailbox.check_scheduled_at
        cores = (time.process_time() - cpu) / max(now - scheduled_at, 1e-9)
        wake_count = 0
        to_wake: list[_Thread] = []
        with self._lock:
            busy_count = self._threads - len(self._idle_threads)
            calls_are_short = self._calls_are_short = (
                self._finished_count * _LONG_S > (now - scheduled_at) * busy_count
            )
            self._long_calls_wait = not calls_are_short and cores < _COMPUTING_CORES
            self._finished_count = 0
            if not self._queue:
                mailbox.loop.call_soon(mailbox.run_callbacks)  # deliver outcomes posted since
                return
            self._draining_threads -= {
                thread
                for thread in self._draining_threads
                if thread.call is not None and now - thread.call_started_at > _LONG_S
            }
            if (
                not self._draining_threads and not calls_are_short
            ):  # if quick, a thread only lacked a core for a moment
                # One at a time if computing threads already share the cores.
                wake_count = (
                    max(1, busy_count)
                    if self._long_calls_wait or cores > _COMPUTING_CORES * busy_count
                    else 1
                )
                to_wake = self._activate(wake_count, self.size if self._long_calls_wait else MAX_COMPUTING)
        self._schedule_check(
            mailbox,
            _CHECK_INTERVAL_S if to_wake and wake_count > 1 else min(2 * pause_s, _MAX_CHECK_INTERVAL_S),
        )
        self._wake(to_wake)
