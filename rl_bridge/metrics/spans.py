"""Where the wall time of a process goes: named work, waiting for something named, and what nobody accounts for.

A span belongs to the task, or the thread outside of asyncio, that opened it; of nested ones the innermost counts.
Many tasks can have a span open at one time, so an instant is given out like this, and the parts always add up to
the wall time:

1. Does any task work, the instant is work, shared evenly by the tasks that work.
2. Otherwise, does any task wait, it is idle, shared evenly by the tasks that wait.
3. Otherwise, in a process that rests between calls and attends to none, it is idle.
4. Otherwise it is unaccounted for.

So a span without `waits_for` must not be held over an `await` of something that happens elsewhere: that would be
waiting sold as work. Tasks in the background of a process open spans of work alone; what the process waits for is
said by its main line.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rl_bridge.metrics.totals import REST, Key, SpanTotals

START: Key = ("start", None)
Owner = asyncio.Task[object] | int
"""The task, or the thread by its number, that a span belongs to."""


class Spans:
    """Gives the wall time of one process out to spans.

    Args:
        clock: Seconds on the wall.
        cpu_clock: Seconds of processor time that the process has used.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._lock = threading.Lock()
        self._current: dict[Owner, _Span] = {}
        self._working: dict[Key, int] = {}
        self._waiting: dict[Key, int] = {}
        self._seconds: dict[Key, float] = {}
        self._rest: Key | None = None
        self._calls = 0
        self._began = time.time()
        self._began_clock = self._settled = clock()
        self._began_cpu = cpu_clock()

    def span(self, name: str, waits_for: str | None = None) -> "_Span":
        """Account for what happens within `with spans.span(...)`.

        Args:
            name: What the process does there.
            waits_for: Whom it waits for, where it only waits; None where it works.
        """
        return _Span(self, (name, waits_for))

    def rest(self, waits_for: str) -> None:
        """From now on, whenever nothing is attended to, the process waits for this.

        For a process that does something only when it is called: then every call belongs into `call`. What no span
        names before that went into its start.
        """
        with self._lock:
            now = self._settle()
            if self._rest is None:
                self._take_for_start(now)
            self._rest = (REST, waits_for)

    def started(self) -> None:
        """What no span has named up to now went into the start of the process. For one that never rests."""
        with self._lock:
            self._take_for_start(self._settle())

    @contextmanager
    def call(self) -> Iterator[None]:
        """Attend to a call within the block: what no span names there is unaccounted for, not rest."""
        with self._lock:
            self._settle()
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._settle()
                self._calls -= 1

    def totals(self) -> SpanTotals:
        """What has been given out since the beginning; open spans count up to now."""
        with self._lock:
            now = self._settle()
            return SpanTotals(
                began=self._began,
                wall_s=now - self._began_clock,
                cpu_s=self._cpu_clock() - self._began_cpu,
                seconds=dict(self._seconds),
            )

    def _enter(self, span: "_Span") -> None:
        with self._lock:
            self._settle()
            span.parent = self._current.get(span.owner)
            if span.parent is not None:
                self._leave(span.parent.key)
            self._current[span.owner] = span
            self._take_up(span.key)

    def _exit(self, span: "_Span") -> None:
        with self._lock:
            self._settle()
            span.closed = True
            # A span that ends before one within it (an abandoned generator's does) is passed over by that one.
            if self._current.get(span.owner) is not span:
                return
            self._leave(span.key)
            parent = span.parent
            while parent is not None and parent.closed:
                parent = parent.parent
            if parent is None:
                del self._current[span.owner]
            else:
                self._current[span.owner] = parent
                self._take_up(parent.key)

    def _settle(self) -> float:
        """Give out the time since the last change; the lock is held."""
        now = self._clock()
        open_now = self._working or self._waiting
        if not open_now and not self._calls and self._rest is not None:
            open_now = {self._rest: 1}
        if open_now:
            share = (now - self._settled) / sum(open_now.values())
            for key, tasks in open_now.items():
                self._seconds[key] = self._seconds.get(key, 0.0) + share * tasks
        self._settled = now
        return now

    def _take_for_start(self, now: float) -> None:
        named = sum(self._seconds.values())
        self._seconds[START] = self._seconds.get(START, 0.0) + now - self._began_clock - named

    def _take_up(self, key: Key) -> None:
        tasks = self._working if key[1] is None else self._waiting
        tasks[key] = tasks.get(key, 0) + 1

    def _leave(self, key: Key) -> None:
        tasks = self._working if key[1] is None else self._waiting
        tasks[key] -= 1
        if not tasks[key]:
            del tasks[key]


class _Span:
    """One passage through a `with` block."""

    __slots__ = ("closed", "key", "owner", "parent", "spans")

    def __init__(self, spans: Spans, key: Key) -> None:
        self.spans = spans
        self.key = key
        self.closed = False
        self.parent: _Span | None = None
        self.owner: Owner

    def __enter__(self) -> Self:
        self.owner = _owner()
        self.spans._enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.spans._exit(self)


def _owner() -> Owner:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        task = None
    return threading.get_ident() if task is None else task


PROCESS_SPANS = Spans()
"""Those of this process; it begins with the import."""


def span(name: str, waits_for: str | None = None) -> _Span:
    """Account for what happens within its block, among the spans of this process; see `Spans.span`."""
    return PROCESS_SPANS.span(name, waits_for)
