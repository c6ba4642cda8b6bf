"""Threads for calls that may wait: one drains the queue of calls, and others help where calls take long.

To wake a thread for each call, and the event loop after it, costs several times as much as a short call. So calls that
come together wake one thread, which takes one after the other, and their outcomes come back together too. Where a call
takes long, those behind it get other threads: at once where the last ones took long too, otherwise within a few
milliseconds.
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
"""Threads of one pool, while their calls wait for something."""

MAX_COMPUTING: Final = 64
"""The same while the process computes: more would only take turns."""

_GATHERED: Final = 64
"""Calls that are enough to wake a thread for, whether or not further ones come."""

_LONG_S: Final = 0.0002
"""A call that takes longer is worth the wake-up of another thread for the next one."""

_TICK_S: Final = 0.001
_QUICK_TICK_S: Final = 0.004
_MAX_TICK_S: Final = 0.016
"""Between two looks at the calls under way, while others wait; twice as long each time that nothing came of it."""

_COMPUTING: Final = 0.5
"""Cores: a process that keeps more busy computes, one that keeps fewer waits for something."""

_HELD_S: Final = 0.0005
_HELD_TOGETHER_S: Final = 0.01
"""How long outcomes are held back while their thread goes on with short calls, or with calls that came together."""

_IDLE_S: Final = 10.0
"""After which a thread without a call ends."""

_PIDS_LIMITS: Final = ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max")

Outcome: TypeAlias = tuple[bool, Any]
"""(True, what was returned) or (False, what was raised)."""


def max_threads() -> int:
    """Return how many threads a pool may have here: a quarter of what a container may, and no more than MAX_THREADS."""
    for path in _PIDS_LIMITS:
        with suppress(OSError, ValueError):
            return max(1, min(MAX_THREADS, int(Path(path).read_text(encoding="ascii")) // 4))
    return MAX_THREADS


def contain(error: BaseException) -> Exception:
    """Return an ordinary exception in place of one that would end more than the call that raised it.

    Panics of compiled libraries are such, and the interrupts and cancellations that an environment makes up.
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
    """What threads hand to one event loop: all that is there when it looks, in one wake-up.

    Attributes:
        loop: The event loop.
        dispatching: Calls are about to be given to threads.
        items: What there is: functions, and with what each is to be called.
        alone: The last call that was given to one had none behind it.
        ticking: A look at the calls under way is due.
        since: The wall clock and the process's CPU time when it was ordered.
    """

    __slots__ = ("_called", "alone", "dispatching", "items", "loop", "since", "ticking")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.dispatching = self.ticking = False
        self.alone = True
        self.since = (0.0, 0.0)
        self.items: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._called = False

    def post(self, fn: Callable[[Any], None], value: Any) -> None:
        """Have a function called on the loop once it is notified, or looks by itself; from any thread."""
        self.items.append((fn, value))

    def notify(self) -> None:
        """Have the loop look, if there is something; from any thread."""
        if (
            self.items and not self._called
        ):  # else whoever has called it was not heard yet, and it finds this too
            self._called = True
            with suppress(RuntimeError):  # a closed loop: nobody waits any more
                self.loop.call_soon_threadsafe(self.empty)

    def empty(self) -> None:
        """Call what there is; on the loop."""
        self._called = False
        items = self.items
        try:
            while items:
                fn, value = items.popleft()
                fn(value)
        finally:
            self.notify()  # one has failed, which the loop reports; the others come all the same


class ThreadCall:
    """One call that waits for a thread, or runs in one.

    Attributes:
        mailbox: Where its outcome is put.
        outcome: The outcome once it is in, whether or not anybody waits; changes on the loop alone.
        then: Called on the loop with the outcome, in the waiter's place. To be set only while there is no outcome:
            whoever is cancelled wakes up a little later, and the outcome may come in between.
        together: It is one of many that came together, so that its outcome may wait for theirs.
        spent_s: Seconds that it ran, where there is an outcome.
        started: Whether a thread runs it; under the pool's lock, like the next two.
        thread: The thread that runs it.
        left: It was given up: no thread takes it up any more, or the one that had has been replaced.
    """

    __slots__ = (
        *("_fn", "_on_begin", "_result", "started", "left", "mailbox", "outcome", "spent_s"),
        *("then", "thread", "together", "waiter"),
    )

    def __init__(
        self,
        mailbox: _Mailbox,
        fn: Callable[[], Any],
        on_begin: Callable[[], None] | None,
        then: Callable[[Outcome], None] | None,
        together: bool,
    ) -> None:
        self.mailbox = mailbox
        self.together = together
        self._fn = fn
        self._on_begin = on_begin
        if then is None:
            self.waiter: asyncio.Future[Outcome] = mailbox.loop.create_future()
        self.outcome: Outcome | None = None
        self.then = then
        self.thread: _Thread | None = None
        self.started = self.left = False

    def __await__(self) -> Generator[None, None, Outcome]:
        """Wait for the outcome outside of a task: `then` resumes whoever waits."""
        yield
        assert self.outcome is not None
        return self.outcome

    def run(self) -> None:
        """Run the call; for the pool's threads."""
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
        if self.then is not None:
            self.then(outcome)
        elif not self.waiter.done():
            self.waiter.set_result(outcome)


class _Thread(threading.Thread):
    """A thread of a pool.

    Attributes:
        call: What it runs.
        began: When that began.
        notified: When it last had the loop look at outcomes.
        wake: Held while it has nothing to do.
    """

    def __init__(self, pool: "ThreadPool", name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._pool = pool
        self.call: ThreadCall | None = None
        self.began = self.notified = 0.0
        self.wake = threading.Lock()
        self.wake.acquire()

    def run(self) -> None:
        while (call := self._pool.next_call(self)) is not None:
            call.run()
            del call  # what it holds is not this thread's while it waits


class ThreadPool:
    """At most `size` daemon threads, started when they are of use; one that has nothing to do for a while ends.

    The standard pool joins its threads when the interpreter ends, so one hung step would keep a server from
    ever stopping; it makes two futures of every call, and wakes a thread and the loop for it.

    Calls begin in the order in which they came. Their queue is bounded by the callers: a session has one call at a
    time, and sessions are capped. The thread of a pool of one never ends before the pool: who asks for one relies on
    what is local to it.
    """

    def __init__(self, size: int, name: str = "environment") -> None:
        self.size = size
        self._name = name
        self._idle_s = _IDLE_S if size > 1 else -1
        self._mailbox: _Mailbox | None = None
        self._queue: deque[ThreadCall] = deque()
        self._lock = threading.Lock()
        # Under the lock:
        self._threads = 0
        self._started = 0
        self._idle: list[_Thread] = []
        self._draining: set[_Thread] = set()  # those whose call, if they have one, is not known to take long
        self._done = 0  # since the last look
        self._long_calls = 0  # the last ones, in a row
        self._quick = False  # at the last look most calls were short
        self._waits = True  # at the last look those that take long waited for something
        self._closed = False
        self._refused = False

    def submit(
        self,
        fn: Callable[[], Any],
        on_begin: Callable[[], None] | None = None,
        then: Callable[[Outcome], None] | None = None,
        together: bool = False,
    ) -> ThreadCall:
        """Queue a call from a running event loop.

        On the loop `on_begin` is called once a thread has taken it up, and `then`, where no task awaits it, with its
        outcome, which may wait for those of other calls where they come `together`.
        """
        loop = asyncio.get_running_loop()
        mailbox = self._mailbox
        if mailbox is None or mailbox.loop is not loop:
            mailbox = self._mailbox = _Mailbox(loop)
        call = ThreadCall(mailbox, fn, on_begin, then, together)
        self._closed = False
        self._queue.append(call)
        if mailbox.alone and not self._draining:
            self._dispatch(mailbox, 1)
        elif not mailbox.dispatching:
            mailbox.dispatching = True
            loop.call_soon(self._dispatch, mailbox, 0)
        return call

    def abort(self, call: ThreadCall, replace: bool = True, *, started: bool = True) -> bool:
        """Stop waiting for a call; return whether it holds a thread, or did until just now: its outcome is to come.

        Args:
            call: A call that nobody waits for any more.
            replace: Another thread takes the place of the one that it holds, which ends with it.
            started: One that has begun too; else that goes on.
        """
        with self._lock:
            if not call.started:
                call.left = True
                return False
            if call.thread is None or not replace or not started:
                return True
            call.left = True
            self._threads -= 1
            self._draining.discard(call.thread)
            woken = [] if self._draining else self._activate(1, MAX_COMPUTING)
        self._wake(woken)
        return True

    def close(self) -> None:
        """Let every thread end after the calls that are already queued, without waiting for them.

        A later call starts threads anew: an app may be served again after its server has stopped.
        """
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.wake.release()

    def next_call(self, thread: _Thread) -> ThreadCall | None:
        """Return what a thread does after the call that it has done; None: it ends. For the pool's threads."""
        done, thread.call = thread.call, None
        now = time.monotonic()
        spent_s = now - thread.began
        long = spent_s > _LONG_S
        if done is not None:
            done.post(spent_s)
            held_s = _HELD_TOGETHER_S if done.together else 0 if long else _HELD_S
            if now - thread.notified > held_s:
                thread.notified = now
                done.mailbox.notify()
        while True:
            with self._lock:
                if done is not None:
                    done.thread = None
                    self._done += 1
                    self._long_calls = self._long_calls + 1 if long else 0
                if ends := done is not None and done.left:
                    pass
                elif (call := self._first()) is not None:
                    call.started = True
                    # Stamped anew: the call may have come since this thread has done the one before.
                    call.thread, thread.call, thread.began = thread, call, time.monotonic()
                    self._draining.add(thread)
                    return call
                else:
                    self._draining.discard(thread)
                    if ends := self._closed:
                        self._threads -= 1
                    else:
                        self._idle.append(thread)
            if done is not None:
                done.mailbox.notify()
            if ends:
                return None
            done = None
            if not thread.wake.acquire(timeout=self._idle_s):
                with self._lock:
                    if thread in self._idle:
                        self._idle.remove(thread)
                        self._threads -= 1
                        return None
                thread.wake.acquire()  # it has just been given something to do

    def _first(self) -> ThreadCall | None:
        """Pop the first call that is not abandoned; called under the lock."""
        while self._queue:
            if not (call := self._queue.popleft()).left:
                return call
        return None

    def _dispatch(self, mailbox: _Mailbox, seen: int) -> None:
        """Wake a thread, once no further calls come, where none is at work; one a call where these take long."""
        waiting = len(self._queue)
        if seen < waiting < _GATHERED:
            mailbox.loop.call_soon(self._dispatch, mailbox, waiting)
            return
        mailbox.dispatching = False
        mailbox.alone = waiting < 2
        with self._lock:
            long = self._long_calls > 1
            wanted = waiting if long and self._waits else 0 if self._draining else 1
            woken = self._activate(wanted, MAX_COMPUTING)
            left = len(self._queue) - len(woken)
            if not mailbox.ticking:
                self._done = 0
        self._wake(woken)
        # Of two that are woken one may take both calls, and say nothing of the first while it is at the second.
        if (left > 0 or len(woken) > 1 or mailbox.items or not self._draining) and not mailbox.ticking:
            self._tick_later(mailbox, _QUICK_TICK_S if self._quick and not long else _TICK_S)

    def _activate(self, wanted: int, limit: int) -> list[_Thread]:
        """Return threads to wake, no more than there are calls; `limit` is for all at work. Under the lock."""
        room = min(limit, self.size) - (self._threads - len(self._idle))
        woken = []
        for _ in range(min(wanted, room, len(self._queue))):
            if self._idle:
                thread = self._idle.pop()
            else:
                self._threads += 1
                self._started += 1
                thread = _Thread(self, f"{self._name}-{self._started}")
            self._draining.add(thread)
            woken.append(thread)
        return woken

    def _wake(self, threads: Iterable[_Thread]) -> None:
        for thread in threads:
            if thread.ident is not None:
                thread.wake.release()
                continue
            try:
                thread.start()
                self._refused = False
            except RuntimeError as error:
                with self._lock:
                    self._threads -= 1
                    self._draining.discard(thread)
                if not self._refused:  # the next look tries again, and again
                    self._refused = True
                    logger.error("the system gives no thread beside %d: %s; calls wait", self._threads, error)

    def _tick_later(self, mailbox: _Mailbox, pause_s: float) -> None:
        mailbox.ticking = True
        mailbox.since = (time.monotonic(), time.process_time())
        mailbox.loop.call_later(pause_s, self._tick, mailbox, pause_s)

    def _tick(self, mailbox: _Mailbox, pause_s: float) -> None:
        """Give calls that wait behind long ones more threads: twice as many each time, while these are of use."""
        mailbox.ticking = False
        mailbox.empty()  # what a thread holds back that is in a long call now
        now, (began, cpu) = time.monotonic(), mailbox.since
        cores = (time.process_time() - cpu) / max(now - began, 1e-9)
        more = 0
        woken: list[_Thread] = []
        with self._lock:
            at_work = self._threads - len(self._idle)
            quick = self._quick = self._done * _LONG_S > (now - began) * at_work
            self._waits = not quick and cores < _COMPUTING
            self._done = 0
            if not self._queue:
                mailbox.loop.call_soon(mailbox.empty)  # what came since, of a thread that has gone on
                return
            self._draining -= {
                thread
                for thread in self._draining
                if thread.call is not None and now - thread.began > _LONG_S
            }
            if not self._draining and not quick:  # or it was only for a moment without a core
                # Where cores are free for no more, they take turns.
                more = max(1, at_work) if self._waits or cores > _COMPUTING * at_work else 1
                woken = self._activate(more, self.size if self._waits else MAX_COMPUTING)
        self._tick_later(mailbox, _TICK_S if woken and more > 1 else min(2 * pause_s, _MAX_TICK_S))
        self._wake(woken)
