"""A server's counters, and `GET /metrics`, which exposes them in Prometheus's format (docs/observing.md).

A step costs a few additions to plain numbers. The workers of a fleet copy their numbers into a file that all of them
map, so that any worker answers for all, and a restarted worker continues counting where its predecessor stopped.
"""

import asyncio
import mmap
import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Send

from openenv_core.protocol import errors, jsonrpc

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from servers.sessions.slots import SessionSlots

METRICS_PATH: Final = "/metrics"

BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds of the histogram's buckets in seconds, without the last bucket, which has none."""

CODES: Final = (
    errors.INVALID_JSON,
    errors.UNKNOWN_TYPE,
    errors.VALIDATION_ERROR,
    errors.EXECUTION_ERROR,
    errors.CAPACITY_REACHED,
    errors.FACTORY_ERROR,
    errors.SESSION_ERROR,
    errors.NOT_EXECUTED,
    *map(str, jsonrpc.CODES),
    "OTHER",
)
"""Codes of errors sent to clients: in frames and over plain HTTP, then those of JSON-RPC."""

CALLS: Final = ("reset", "step", "tool")
RESET, STEP, TOOL = range(len(CALLS))
_CALL_SIZE: Final = len(BUCKETS_S) + 4
SIZE: Final = len(CALLS) * _CALL_SIZE + 5 + len(CODES)
"""Length of one worker's row of numbers."""

PUBLISH_INTERVAL_S: Final = 0.5
"""Interval in seconds at which a worker publishes its numbers to the others of its fleet."""

_NUMBER_BYTES: Final = 8


def create_unnamed_file(size: int) -> int:
    """Return a descriptor of a new unnamed file filled with zeros, for processes to map."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(size))  # so that no access needs disk space later
        return os.dup(file.fileno())


class SharedCounts:
    """The numbers of all workers, in a file that all of them map; each writes its own row.

    Args:
        fd: Descriptor of the file.
        worker: Index of this process's row.
        workers: Number of workers.
    """

    def __init__(self, fd: int, worker: int, workers: int) -> None:
        self._memory = memoryview(mmap.mmap(fd, workers * SIZE * _NUMBER_BYTES)).cast("d")
        self._worker = worker
        self._workers = workers

    @staticmethod
    def create(workers: int) -> int:
        """Return a descriptor of a new unnamed file filled with zeros."""
        return create_unnamed_file(workers * SIZE * _NUMBER_BYTES)

    def read_own_row(self) -> list[float]:
        """Return this worker's row, as published by its predecessor if that died."""
        return self._rows()[self._worker]

    def _rows(self) -> list[list[float]]:
        numbers: list[float] = self._memory.tolist()  # type: ignore[assignment]  # doubles, despite the stubs
        return [numbers[offset : offset + SIZE] for offset in range(0, self._workers * SIZE, SIZE)]

    def publish(self, values: list[float]) -> list[list[float]]:
        """Write this worker's row; return all rows."""
        offset = self._worker * SIZE
        self._memory[offset : offset + SIZE] = memoryview(array("d", values))
        return self._rows()


class _Call(Protocol):
    """One call of a batched request."""

    spent_s: float

    @property
    def is_read(self) -> bool: ...
    @property
    def outcome(self) -> Any: ...
    @property
    def options(self) -> Any: ...


@dataclass(slots=True)
class CallCounts:
    """Answered calls of one kind.

    Attributes:
        buckets: Number of calls in each bucket of duration.
        seconds: Total time from their frames to their replies.
        environment_s: The part of it spent in the environment.
        batch_wait_s: The part of it that calls of one request waited for each other.
    """

    buckets: list[float]
    seconds: float
    environment_s: float
    batch_wait_s: float

    def to_numbers(self) -> list[float]:
        """Return all of it."""
        return [*self.buckets, self.seconds, self.environment_s, self.batch_wait_s]


class Counts:
    """The counters of one worker, or the sums over several.

    Args:
        numbers: A row of numbers as `to_numbers` returns it.

    Attributes:
        calls: Counts by kind of call: RESET, STEP, TOOL.
        received_bytes: Bytes of requests.
        sent_bytes: Bytes of replies.
        opened_sessions: Sessions opened.
        granted_slots: Slots granted.
        waited_s: Seconds waited for these slots, over all of them.
        errors: Errors sent, by the index of their code in CODES.
    """

    _TOTALS = ("received_bytes", "sent_bytes", "opened_sessions", "granted_slots", "waited_s")
    __slots__ = ("calls", "errors", *_TOTALS)

    received_bytes: float
    sent_bytes: float
    opened_sessions: float
    granted_slots: float
    waited_s: float

    def __init__(self, numbers: Sequence[float]) -> None:
        rest = iter(numbers)
        self.calls = [CallCounts(list(islice(rest, len(BUCKETS_S) + 1)), *islice(rest, 3)) for _ in CALLS]
        for name in self._TOTALS:
            setattr(self, name, next(rest))
        self.errors = list(rest)

    def to_numbers(self) -> list[float]:
        """Return all of it."""
        by_call = chain.from_iterable(calls.to_numbers() for calls in self.calls)
        return [*by_call, *(getattr(self, name) for name in self._TOTALS), *self.errors]


class ServerMetrics:
    """Counts events in one worker process, and serves the counters of all workers.

    Args:
        shared: The numbers of all workers, if there are several.

    Attributes:
        environment: Name of the environment, for the label.
        enabled: Whether calls are timed, bytes counted and /metrics served; callers check it before they count.
        counts: The counters of this process.
        slots: The slots of the whole server.
    """

    slots: "SessionSlots"

    def __init__(self, environment: str, enabled: bool = True, shared: SharedCounts | None = None) -> None:
        self.environment = environment
        self.enabled = enabled
        self._shared = shared
        self.counts = Counts([0.0] * SIZE if shared is None else shared.read_own_row())
        self._timer: asyncio.TimerHandle | None = None

    # Counting

    def observe_batch(self, calls: Sequence[_Call], seconds: float, sequential: bool) -> None:
        """Count the calls that one frame answers.

        Args:
            calls: The calls; failed ones are not counted.
            seconds: Time from the request to that frame.
            sequential: Whether the environments ran one after the other, rather than concurrently.
        """
        durations_s = [call.spent_s for call in calls if not isinstance(call.outcome, BaseException)]
        if durations_s and not calls[0].is_read:  # all calls of a frame are of one kind
            counts = self.counts.calls[STEP if calls[0].options is None else RESET]
            count, spent_s = len(durations_s), sum(durations_s)
            counts.buckets[bisect_left(BUCKETS_S, seconds)] += count
            counts.seconds += count * seconds
            counts.environment_s += spent_s
            server_s = max(0.0, seconds - (spent_s if sequential else max(durations_s)))
            counts.batch_wait_s += count * seconds - spent_s - server_s

    def count_received(self, frame: str | bytes) -> None:
        """Count the bytes of a request."""
        self.counts.received_bytes += len(frame) if frame.isascii() else size_of(frame)

    def count_sent(self, frame: str | bytes) -> None:
        """Count the bytes of a reply."""
        self.counts.sent_bytes += len(frame) if frame.isascii() else size_of(frame)

    def count_error(self, code: str | int) -> None:
        """Count an error sent to a client."""
        code = str(code)
        self.counts.errors[CODES.index(code if code in CODES else "OTHER")] += 1

    def count_granted(self, slots: int, waited_s: float) -> None:
        """Count slots granted to a request after a wait of `waited_s` seconds."""
        self.counts.granted_slots += slots
        self.counts.waited_s += slots * waited_s

    def counting(self, send: Send) -> Send:
        """Return an HTTP response's `send` that counts its bytes."""

        async def count_and_send(message: Message) -> None:
            self.count_sent(message.get("body", b""))
            await send(message)

        return count_and_send

    # Publishing and serving

    def start(self) -> None:
        """Publish the counters to the other workers, if any, now and at regular intervals."""
        if self.enabled and self._shared is not None:
            self._shared.publish(self.counts.to_numbers())
            self._timer = asyncio.get_running_loop().call_later(PUBLISH_INTERVAL_S, self.start)

    def stop(self) -> None:
        """Publish the counters a last time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._shared is not None:
            self._shared.publish(self.counts.to_numbers())

    async def serve(self, request: Request) -> Response:
        """Answer GET /metrics with the counters of all workers."""
        from prometheus_client.exposition import choose_encoder

        registry: Any = self  # the encoder calls only `collect`
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": kind})

    def collect(self) -> "Iterator[Metric]":
        """Yield every metric; the interface of prometheus_client's collectors."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            SummaryMetricFamily,
        )

        if self._shared is None:
            rows, total = [self.counts], self.counts
        else:
            numbers = self._shared.publish(self.counts.to_numbers())
            rows, total = list(map(Counts, numbers)), Counts(list(map(sum, zip(*numbers, strict=True))))
        slots, environment = self.slots, self.environment

        def make_family(
            kind: Any, name: str, text: str, by_label: Mapping[tuple[str, ...], Any], *labels: str
        ) -> Any:
            metric = kind(f"ropewalk_{name}", text, labels=("environment", *labels))
            for label_values, value in by_label.items():
                metric.add_metric(
                    (environment, *label_values), *(value if isinstance(value, tuple) else (value,))
                )
            return metric

        def label_by_call(value: Callable[[CallCounts], Any]) -> dict[tuple[str, ...], Any]:
            return {(name,): value(calls) for name, calls in zip(CALLS, total.calls, strict=True)}

        def label_by_worker(values: Iterable[float]) -> dict[tuple[str, ...], float]:
            return {(str(number),): value for number, value in enumerate(values)}

        def to_histogram(calls: CallCounts) -> tuple[list[tuple[str, float]], float]:
            bounds = [*map(str, BUCKETS_S), "+Inf"]
            return list(zip(bounds, accumulate(calls.buckets), strict=True)), calls.seconds

        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        text = "Time from the frame of a call to its reply, in the server and the environment."
        yield make_family(HistogramMetricFamily, "call_seconds", text, label_by_call(to_histogram), "call")
        text = "Time of these calls in the environment's methods."
        by_label = label_by_call(lambda calls: calls.environment_s)
        yield make_family(counter, "environment_seconds", text, by_label, "call")
        text = "Time of their requests in the server: reading, validating, waiting for a session or thread, writing."
        by_label = label_by_call(lambda calls: calls.seconds - calls.environment_s - calls.batch_wait_s)
        yield make_family(counter, "server_seconds", text, by_label, "call")
        by_label = {(code,): count for code, count in zip(CODES, total.errors, strict=True)}
        yield make_family(counter, "errors", "Errors sent to clients.", by_label, "code")
        text = "Bytes of requests to sessions: frames, and bodies over HTTP."
        yield make_family(counter, "received_bytes", text, {(): total.received_bytes})
        yield make_family(counter, "sent_bytes", "Bytes of the replies to them.", {(): total.sent_bytes})
        yield make_family(counter, "sessions_opened", "Sessions opened.", {(): total.opened_sessions})
        text = "Steps answered by each worker process."
        by_label = label_by_worker(sum(row.calls[STEP].buckets) for row in rows)
        yield make_family(counter, "worker_steps", text, by_label, "worker")
        yield make_family(gauge, "slots", "Greatest number of concurrent sessions.", {(): slots.total})
        text = "Slots in use in each worker process."
        yield make_family(gauge, "slots_in_use", text, label_by_worker(slots.by_worker), "worker")
        yield make_family(gauge, "queue_waiting", "Requests that wait for a slot.", {(): slots.waiting})
        text = "Time that requests waited for the slots they were granted."
        yield make_family(
            SummaryMetricFamily, "queue_wait_seconds", text, {(): (total.granted_slots, total.waited_s)}
        )


def size_of(text: str | bytes) -> int:
    """Return the size of a frame in bytes, as sent."""
    return len(text.encode() if isinstance(text, str) else text)
