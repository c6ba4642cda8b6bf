"""A bounded pool of daemon threads for methods that block.

The standard pool joins its threads when the interpreter ends, so one hung step would keep a server from
ever stopping; and every call through it makes two futures. This one does neither.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

from openenv_core.protocol.errors import text_of

Outcome: TypeAlias = tuple[bool, Any]
"""(True, what was returned) or (False, what was raised)."""


def contained(error: BaseException) -> Exception:
    """Return an exception that tells of one which would end more than the call that raised it.

    Panics of compiled libraries are such, and the interrupts and cancellations that an environment makes up.
    """
    told = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    told.__cause__ = error
    return told


class ThreadCall:
    """One call that waits for a thread, or runs in one.

    Attributes:
        waiter: Resolves to the outcome, on the loop that submitted the call.
        outcome: The outcome once it is in, whether or not anybody waits; changes on that loop alone.
        on_begin: Called on that loop once a thread has taken it up, unless nobody waits for it any more.
        on_late: Called on that loop with the outcome if the waiter was cancelled meanwhile. To be set only
            while there is no outcome: whoever is cancelled wakes up a little later, and the outcome may come
            in between.
        running: A thread has taken it up; under the pool's lock, like the next two.
        dropped: It was given up before that, and no thread takes it up any more.
        left: It was given up after that, and its thread has been replaced.
    """

    __slots__ = (
        "_args",
        "_fn",
        "_loop",
        "dropped",
        "left",
        "on_begin",
        "on_late",
        "outcome",
        "running",
        "waiter",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        on_begin: Callable[[], None] | None,
    ) -> None:
        self._loop = loop
        self._fn = fn
        self._args = args
        self.waiter: asyncio.Future[Outcome] = loop.create_future()
        self.outcome: Outcome | None = None
        self.on_begin = on_begin
        self.on_late: Callable[[Outcome], None] | None = None
        self.running = self.dropped = self.left = False

    def run(self) -> None:
        """Run the call; for the pool's threads."""
        if self.on_begin is not None:
            with suppress(RuntimeError):  # a closed loop, as below
                self._loop.call_soon_threadsafe(self._begin, self.on_begin)
        try:
            outcome = (True, self._fn(*self._args))
        except (Exception, SystemExit) as error:
            outcome = (False, error)
        except BaseException as error:
            outcome = (False, contained(error))
        with suppress(RuntimeError):  # a closed loop: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, outcome)

    def _begin(self, told: Callable[[], None]) -> None:
        if not self.waiter.done():
            told()

    def _deliver(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if not self.waiter.done():
            self.waiter.set_result(outcome)
        elif self.on_late is not None:
            self.on_late(outcome)


class ThreadPool:
    """At most `size` daemon threads, started when first needed.

    Its queue is bounded by its callers: a session has one call at a time, and sessions are capped.

    Args:
        size: The greatest number of threads.
        name: What the threads are called.
    """

    def __init__(self, size: int, name: str = "environment") -> None:
        self.size = size
        self._name = name
        self._queue: SimpleQueue[ThreadCall | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._outstanding = 0

    def submit(
        self, fn: Callable[..., Any], *args: Any, on_begin: Callable[[], None] | None = None
    ) -> ThreadCall:
        """Queue a call from a running event loop.

        Args:
            fn: What to call.
            *args: With what.
            on_begin: Called on the loop once a thread has taken it up.
        """
        call = ThreadCall(asyncio.get_running_loop(), fn, args, on_begin)
        with self._lock:
            self._outstanding += 1
            number = self._grow()
        self._queue.put(call)
        if number is not None:
            self._start(number)
        return call

    def _grow(self) -> int | None:
        """Return the number of a thread to start, where one more is of use; under the lock."""
        if self._outstanding <= self._threads or self._threads >= self.size:
            return None
        self._threads += 1
        return self._threads

    def _start(self, number: int) -> None:
        threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True).start()

    def abort(self, call: ThreadCall, replace: bool = True) -> bool:
        """Stop waiting for a call; return whether it still holds a thread.

        Args:
            call: A call that nobody waits for any more.
            replace: Another thread takes the place of the one that it holds, which ends with it.
        """
        with self._lock:
            if not call.running:
                call.dropped = True
                return False
            if not replace:
                return True
            call.left = True
            self._threads -= 1
            self._outstanding -= 1
            number = self._grow()
        if number is not None:
            self._start(number)
        return True

    def close(self) -> None:
        """Let every thread end after the calls that are already queued, without waiting for them.

        A later call starts threads anew: an app may be served again after its server has stopped.
        """
        with self._lock:
            threads, self._threads = self._threads, 0
        for _ in range(threads):
            self._queue.put(None)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            with self._lock:
                call.running = not call.dropped
            if call.running:
                call.run()
            with self._lock:
                if call.left:
                    return
                self._outstanding -= 1
