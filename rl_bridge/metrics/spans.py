"""Accounting for the wall time of a process by spans, and sums over several processes."""

import asyncio
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

REST: Final = "rest"
"""The activity of a process that has no work to do."""
SPAN: Final = "span"
"""The prefix of these metrics' names."""
_NUMBER_SUFFIX: Final = re.compile(r"(-\d+)+$")

Key: TypeAlias = tuple[str, str | None]
"""An activity, and what it waits for; None if it is work."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SpanTotals:
    """Seconds by activity.

    Attributes:
        began: When counting began, in seconds since the epoch; distinguishes a process from its successor.
        wall_s: Wall time; summed over processes if totals were merged.
        cpu_s: CPU time.
        seconds: Parts of the wall time; the rest of it is unaccounted for.
    """

    began: float
    wall_s: float
    cpu_s: float
    seconds: Mapping[Key, float] = field(default_factory=dict)

    @property
    def work(self) -> dict[str, float]:
        """Seconds of work by name."""
        return _sum_by_name(
            (name, seconds) for (name, waits_for), seconds in self.seconds.items() if not waits_for
        )

    @property
    def idle(self) -> dict[str, float]:
        """Seconds of waiting by reason."""
        return _sum_by_name(
            (waits_for, seconds) for (_, waits_for), seconds in self.seconds.items() if waits_for
        )

    @property
    def rest_s(self) -> float:
        """Seconds without work to do."""
        return sum(seconds for (name, _), seconds in self.seconds.items() if name == REST)

    @property
    def unaccounted_s(self) -> float:
        """Seconds outside of all spans."""
        return max(0.0, self.wall_s - sum(self.seconds.values()))

    def subtract(self, earlier: Self | None) -> Self:
        """Return the totals since `earlier`; all of them if that is None or of another process."""
        if earlier is None or earlier.began != self.began:
            return self
        return type(self)(
            began=self.began,
            wall_s=self.wall_s - earlier.wall_s,
            cpu_s=self.cpu_s - earlier.cpu_s,
            seconds={
                key: seconds - earlier.seconds.get(key, 0.0)
                for key, seconds in self.seconds.items()
                if seconds > earlier.seconds.get(key, 0.0)
            },
        )

    def merge(self, other: Self) -> Self:
        """Return the sum of these and another process's totals."""
        keys = dict.fromkeys((*self.seconds, *other.seconds))
        return type(self)(
            began=min(self.began, other.began),
            wall_s=self.wall_s + other.wall_s,
            cpu_s=self.cpu_s + other.cpu_s,
            seconds={key: self.seconds.get(key, 0.0) + other.seconds.get(key, 0.0) for key in keys},
        )

    def metrics(self, process: str) -> dict[str, float]:
        """Return shares of the wall time of a process such as `trainer`, by their names in the log."""
        if self.wall_s <= 0.0:
            return {}
        parts = {"unaccounted": self.unaccounted_s, "cpu": self.cpu_s}
        for (name, waits_for), seconds in self.seconds.items():
            path = (
                f"work/{name}" if waits_for is None else f"{'rest' if name == REST else 'idle'}/{waits_for}"
            )
            parts[path] = parts.get(path, 0.0) + seconds
        return {f"{SPAN}/{process}/{path}": seconds / self.wall_s for path, seconds in parts.items()}

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float], wall_s: float) -> dict[str, Self]:
        """Return the totals of an interval of `wall_s` seconds, by process, from its shares in the log."""
        by_process: dict[str, tuple[float, dict[Key, float]]] = {}
        for figure, share in metrics.items():
            top, _, rest = figure.partition("/")
            process, _, path = rest.partition("/")
            kind, _, name = path.partition("/")
            if top != SPAN:
                continue
            cpu_s, seconds = by_process.get(process, (0.0, {}))
            if kind == "cpu":
                cpu_s = share * wall_s
            elif name:
                # The log has only the reason of waiting, not the activity.
                seconds[(name, None) if kind == "work" else (kind, name)] = share * wall_s
            by_process[process] = cpu_s, seconds
        return {
            process: cls(began=0.0, wall_s=wall_s, cpu_s=cpu_s, seconds=seconds)
            for process, (cpu_s, seconds) in by_process.items()
        }

    def as_json(self) -> dict[str, Any]:
        """Return them as JSON values."""
        return {
            "began": self.began,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
            "seconds": [[name, waits_for, seconds] for (name, waits_for), seconds in self.seconds.items()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Parse the result of `as_json`."""
        return cls(
            began=float(data["began"]),
            wall_s=float(data["wall_s"]),
            cpu_s=float(data["cpu_s"]),
            seconds={
                (str(name), None if waits_for is None else str(waits_for)): float(seconds)
                for name, waits_for, seconds in data["seconds"]
            },
        )


class SpanWindow:
    """Splits the running totals of processes into consecutive intervals."""

    def __init__(self) -> None:
        self._earlier: dict[str, SpanTotals] = {}

    def advance(self, totals: Mapping[str, SpanTotals]) -> dict[str, SpanTotals]:
        """Return the totals since the last call, by process.

        A replaced process starts from zero; a missing one is dropped.
        """
        seconds = {process: total.subtract(self._earlier.get(process)) for process, total in totals.items()}
        self._earlier = dict(totals)
        return seconds


def group_by_role(totals: Mapping[str, SpanTotals]) -> dict[str, SpanTotals]:
    """Sum totals by role; a process is named after its role, or `<role>-<number>...`."""
    roles: dict[str, SpanTotals] = {}
    for process, total in totals.items():
        role = _NUMBER_SUFFIX.sub("", process)
        roles[role] = roles[role].merge(total) if role in roles else total
    return roles


def _sum_by_name(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, seconds in pairs:
        sums[name] = sums.get(name, 0.0) + seconds
    return sums


START: Key = ("start", None)
Owner = asyncio.Task[object] | int
"""The task, or the thread's identifier, that a span belongs to."""


class Spans:
    """Distributes the wall time of one process over spans.

    Concurrent spans share it equally; while any span works, spans that wait get nothing.
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
        self._began_clock = self._accounted_until = clock()
        self._began_cpu = cpu_clock()

    def span(self, name: str, waits_for: str | None = None) -> "_Span":
        """Return a context manager that accounts for the time within it."""
        return _Span(self, (name, waits_for))

    def rest(self, waits_for: str) -> None:
        """Count time outside of spans and calls, from now on, as waiting for this.

        For a process that works only when called; every call then has to be in `call`. Time outside of spans until now
        counts as the process's start.
        """
        with self._lock:
            now = self._distribute_time()
            if self._rest is None:
                self._assign_to_start(now)
            self._rest = (REST, waits_for)

    def mark_started(self) -> None:
        """Count time outside of spans until now as the process's start. For a process that never rests."""
        with self._lock:
            self._assign_to_start(self._distribute_time())

    @contextmanager
    def call(self) -> Iterator[None]:
        """Mark the block as handling a call: time outside of spans in it is unaccounted for, not rest."""
        with self._lock:
            self._distribute_time()
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._distribute_time()
                self._calls -= 1

    def totals(self) -> SpanTotals:
        """Return the totals since the beginning; open spans count up to now."""
        with self._lock:
            now = self._distribute_time()
            return SpanTotals(
                began=self._began,
                wall_s=now - self._began_clock,
                cpu_s=self._cpu_clock() - self._began_cpu,
                seconds=dict(self._seconds),
            )

    def _enter(self, span: "_Span") -> None:
        with self._lock:
            self._distribute_time()
            span.parent = self._current.get(span.owner)
            if span.parent is not None:
                self._close_key(span.parent.key)
            self._current[span.owner] = span
            self._open_key(span.key)

    def _exit(self, span: "_Span") -> None:
        with self._lock:
            self._distribute_time()
            span.closed = True
            # A span that ends before an inner one (an abandoned generator's does) is skipped when the inner one ends.
            if self._current.get(span.owner) is not span:
                return
            self._close_key(span.key)
            parent = span.parent
            while parent is not None and parent.closed:
                parent = parent.parent
            if parent is None:
                del self._current[span.owner]
            else:
                self._current[span.owner] = parent
                self._open_key(parent.key)

    def _distribute_time(self) -> float:
        """Distribute the time since the last change; the lock is held."""
        now = self._clock()
        open_now = self._working or self._waiting
        if not open_now and not self._calls and self._rest is not None:
            open_now = {self._rest: 1}
        if open_now:
            share = (now - self._accounted_until) / sum(open_now.values())
            for key, tasks in open_now.items():
                self._seconds[key] = self._seconds.get(key, 0.0) + share * tasks
        self._accounted_until = now
        return now

    def _assign_to_start(self, now: float) -> None:
        named = sum(self._seconds.values())
        self._seconds[START] = self._seconds.get(START, 0.0) + now - self._began_clock - named

    def _open_key(self, key: Key) -> None:
        tasks = self._working if key[1] is None else self._waiting
        tasks[key] = tasks.get(key, 0) + 1

    def _close_key(self, key: Key) -> None:
        tasks = self._working if key[1] is None else self._waiting
        tasks[key] -= 1
        if not tasks[key]:
            del tasks[key]


class _Span:
    """The context manager of one span."""

    __slots__ = ("closed", "key", "owner", "parent", "spans")

    def __init__(self, spans: Spans, key: Key) -> None:
        self.spans = spans
        self.key = key
        self.closed = False
        self.parent: _Span | None = None
        self.owner: Owner

    def __enter__(self) -> Self:
        self.owner = _get_current_owner()
        self.spans._enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.spans._exit(self)


def _get_current_owner() -> Owner:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return threading.get_ident() if task is None else task


PROCESS_SPANS = Spans()
"""The spans of this process, counted from the import on."""


def span(name: str, waits_for: str | None = None) -> _Span:
    """Account for the time within its block, among the spans of this process; see `Spans.span`."""
    return PROCESS_SPANS.span(name, waits_for)


@contextmanager
def log_phase(label: str) -> Iterator[None]:
    """Log the begin and the end of something slow to stderr; a phase without an end is the one that hangs."""
    began, outcome = time.monotonic(), "failed"
    _log_line(f"{label} ...")
    try:
        yield
        outcome = "done"
    finally:
        _log_line(f"{label}: {outcome} after {time.monotonic() - began:.1f} s")


def _log_line(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)  # noqa: T201 - it is the log
