"""What a server counts of itself, and `GET /metrics`, which tells it in Prometheus's format (docs/observing.md).

A step costs a few additions to plain numbers in one list. The workers of a fleet copy their lists into a file that all
of them map, so that any of them answers for all, and a worker that is started again counts on.
"""

import asyncio
import mmap
import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Send

from openenv_core.protocol import errors, jsonrpc

if TYPE_CHECKING:
    from prometheus_client.core import Metric

METRICS_PATH: Final = "/metrics"

BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds of the histogram's buckets, but the last, which has none."""

CODES: Final = (
    errors.INVALID_JSON,
    errors.UNKNOWN_TYPE,
    errors.VALIDATION_ERROR,
    errors.EXECUTION_ERROR,
    errors.CAPACITY_REACHED,
    errors.FACTORY_ERROR,
    errors.SESSION_ERROR,
    errors.NOT_EXECUTED,
    *map(
        str,
        (
            jsonrpc.PARSE_ERROR,
            jsonrpc.INVALID_REQUEST,
            jsonrpc.METHOD_NOT_FOUND,
            jsonrpc.INVALID_PARAMS,
            jsonrpc.INTERNAL_ERROR,
            jsonrpc.SERVER_ERROR,
        ),
    ),
    "OTHER",
)
"""Of errors that callers are told: codes of frames and of plain HTTP, then those of JSON-RPC."""

CALLS: Final = ("reset", "step", "tool")
_SUM: Final = len(BUCKETS_S) + 1
_ENVIRONMENT: Final = _SUM + 1
_TOGETHER: Final = _SUM + 2  # of calls in one request: seconds that each waited for the others
_CALL: Final = _SUM + 3
RESET, STEP, TOOL = (number * _CALL for number in range(len(CALLS)))
_RECEIVED, _SENT, _OPENED, _ADMITTED, _WAITED, _ERRORS = range(len(CALLS) * _CALL, len(CALLS) * _CALL + 6)
SIZE: Final = _ERRORS + len(CODES)
"""Numbers of one worker."""

PUBLISH_INTERVAL_S: Final = 0.5
"""Between two copies that a worker makes for the others of its fleet."""

_NUMBER_BYTES: Final = 8


class SharedCounts:
    """The numbers of every worker, in a file that all map; each writes its own row.

    Args:
        fd: The file.
        worker: Whose row is this process's.
        workers: How many there are.
    """

    def __init__(self, fd: int, worker: int, workers: int) -> None:
        self._memory = memoryview(mmap.mmap(fd, workers * SIZE * _NUMBER_BYTES)).cast("d")
        self._worker = worker
        self._workers = workers

    @staticmethod
    def create(workers: int) -> int:
        """Return a descriptor of a new file without a name, of zeros."""
        with tempfile.TemporaryFile() as file:
            file.truncate(workers * SIZE * _NUMBER_BYTES)
            return os.dup(file.fileno())

    def rows(self) -> list[list[float]]:
        """Return what each worker has published."""
        numbers: list[float] = self._memory.tolist()  # type: ignore[assignment]  # of doubles, whatever the stubs say
        return [numbers[at : at + SIZE] for at in range(0, self._workers * SIZE, SIZE)]

    def publish(self, values: list[float]) -> list[list[float]]:
        """Write this worker's row; return those of all."""
        at = self._worker * SIZE
        self._memory[at : at + SIZE] = memoryview(array("d", values))
        return self.rows()


class _Slots(Protocol):
    """The slots of a server."""

    @property
    def total(self) -> int: ...
    @property
    def by_worker(self) -> list[int]: ...
    @property
    def waiting(self) -> int: ...


class _Call(Protocol):
    """One call of many in a request."""

    spent_s: float

    @property
    def reads(self) -> bool: ...
    @property
    def outcome(self) -> Any: ...
    @property
    def options(self) -> Any: ...


class ServerMetrics:
    """Counts of one worker process.

    Args:
        environment: What it serves, for the label.
        enabled: Whether steps are timed, bytes counted and /metrics served.
        shared: Where the workers of a fleet have theirs.

    Attributes:
        enabled: As given; who is in a step looks at it first.
        slots: The slots of the whole server.
    """

    slots: _Slots

    def __init__(self, environment: str, enabled: bool = True, shared: SharedCounts | None = None) -> None:
        self.environment = environment
        self.enabled = enabled
        self._shared = shared
        self._values = [0.0] * SIZE if shared is None else shared.rows()[shared._worker]
        self._timer: asyncio.TimerHandle | None = None

    # What happens

    def observe(self, call: int, seconds: float, environment_s: float) -> None:
        """Count a call that has been answered.

        Args:
            call: RESET, STEP or TOOL.
            seconds: From its frame to its reply.
            environment_s: Of these, in the environment.
        """
        values = self._values
        values[call + bisect_left(BUCKETS_S, seconds)] += 1.0
        values[call + _SUM] += seconds
        values[call + _ENVIRONMENT] += environment_s

    def observe_together(self, calls: Sequence[_Call], seconds: float, in_turn: bool) -> None:
        """Count calls that one frame has answered.

        Args:
            calls: They; those that have failed are none.
            seconds: From the request to that frame.
            in_turn: The environments ran one after the other; else at once, and the longest counts for the request.
        """
        done = [call for call in calls if not call.reads and not isinstance(call.outcome, BaseException)]
        for kind, of_kind in (
            (RESET, [call.spent_s for call in done if call.options is not None]),
            (STEP, [call.spent_s for call in done if call.options is None]),
        ):
            if count := len(of_kind):
                values, spent_s = self._values, sum(of_kind)
                values[kind + bisect_left(BUCKETS_S, seconds)] += count
                values[kind + _SUM] += count * seconds
                values[kind + _ENVIRONMENT] += spent_s
                server_s = max(0.0, seconds - (spent_s if in_turn else max(of_kind)))
                values[kind + _TOGETHER] += count * seconds - spent_s - server_s

    def count_bytes(self, received: str | bytes, sent: str | bytes) -> None:
        """Count a frame and its reply."""
        values = self._values
        values[_RECEIVED] += len(received) if received.isascii() else _size(received)
        values[_SENT] += len(sent) if sent.isascii() else _size(sent)

    def count_error(self, code: str | int) -> None:
        """Count an error that a caller is told."""
        code = str(code)
        self._values[_ERRORS + CODES.index(code if code in CODES else "OTHER")] += 1

    def count_session(self) -> None:
        """Count a session that is opened."""
        self._values[_OPENED] += 1

    def count_admitted(self, slots: int, waited_s: float) -> None:
        """Count slots that a newcomer gets, after how long."""
        self._values[_ADMITTED] += slots
        self._values[_WAITED] += slots * waited_s

    def http(self, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """Return the same, of a request over HTTP whose bytes are counted."""

        async def received() -> Message:
            message = await receive()
            self.count_bytes(message.get("body", b""), b"")
            return message

        async def sent(message: Message) -> None:
            self.count_bytes(b"", message.get("body", b""))
            await send(message)

        return received, sent

    # Who asks

    def start(self) -> None:
        """Begin to publish for the other workers, where there are any."""
        if self.enabled and self._shared is not None:
            self._shared.publish(self._values)
            self._timer = asyncio.get_running_loop().call_later(PUBLISH_INTERVAL_S, self.start)

    def stop(self) -> None:
        """Publish for the last time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._shared is not None:
            self._shared.publish(self._values)

    async def serve(self, request: Request) -> Response:
        """Answer GET /metrics, for all workers."""
        from prometheus_client.exposition import choose_encoder

        registry: Any = self  # of a registry no more than `collect` is asked for
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": kind})

    def collect(self) -> "Iterator[Metric]":
        """Yield every metric, as collectors of prometheus_client do."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            SummaryMetricFamily,
        )

        rows = [self._values] if self._shared is None else self._shared.publish(self._values)
        total = [sum(column) for column in zip(*rows, strict=True)]
        slots, environment = self.slots, self.environment

        def family(
            kind: Any, name: str, text: str, found: Mapping[tuple[str, ...], Any], *labels: str
        ) -> Any:
            made = kind(f"ropewalk_{name}", text, labels=("environment", *labels))
            for of, value in found.items():
                made.add_metric((environment, *of), *(value if isinstance(value, tuple) else (value,)))
            return made

        def of_calls(value: Callable[[int], Any]) -> dict[tuple[str, ...], Any]:
            return {(name,): value(number * _CALL) for number, name in enumerate(CALLS)}

        def seconds(call: int) -> tuple[list[tuple[str, float]], float]:
            bounds = [*map(str, BUCKETS_S), "+Inf"]
            counts = accumulate(total[call : call + len(bounds)])
            return list(zip(bounds, counts, strict=True)), total[call + _SUM]

        def server_s(call: int) -> float:
            return float(total[call + _SUM] - total[call + _ENVIRONMENT] - total[call + _TOGETHER])

        def steps(row: Sequence[float]) -> float:
            return sum(row[STEP : STEP + len(BUCKETS_S) + 1])

        counter, gauge, worker = CounterMetricFamily, GaugeMetricFamily, "worker"
        text = "From the frame of a call to its reply: time in the server and in the environment."
        yield family(HistogramMetricFamily, "call_seconds", text, of_calls(seconds), "call")
        text = "Time of these calls in the environment's own methods."
        found = of_calls(lambda call: total[call + _ENVIRONMENT])
        yield family(counter, "environment_seconds", text, found, "call")
        text = "Time of their requests outside of them: reading, validating, waiting for a turn or a thread, writing."
        yield family(counter, "server_seconds", text, of_calls(server_s), "call")
        found = {(code,): total[_ERRORS + number] for number, code in enumerate(CODES)}
        yield family(counter, "errors", "Errors that callers were told.", found, "code")
        text = "Of requests to sessions: frames, and bodies over HTTP."
        yield family(counter, "received_bytes", text, {(): total[_RECEIVED]})
        yield family(counter, "sent_bytes", "Of what answers them.", {(): total[_SENT]})
        yield family(counter, "sessions_opened", "Sessions that were opened.", {(): total[_OPENED]})
        found = {(str(number),): steps(row) for number, row in enumerate(rows)}
        yield family(counter, "worker_steps", "Steps that each worker process has answered.", found, worker)
        yield family(gauge, "slots", "Sessions that there may be at once.", {(): slots.total})
        found = {(str(number),): taken for number, taken in enumerate(slots.by_worker)}
        yield family(gauge, "slots_in_use", "Slots taken, in each worker process.", found, worker)
        yield family(gauge, "queue_waiting", "Newcomers that wait for a slot.", {(): slots.waiting})
        text = "Time that newcomers waited for the slots that they got."
        yield family(
            SummaryMetricFamily, "queue_wait_seconds", text, {(): (total[_ADMITTED], total[_WAITED])}
        )


def _size(part: str | bytes) -> int:
    return len(part.encode() if isinstance(part, str) else part)
