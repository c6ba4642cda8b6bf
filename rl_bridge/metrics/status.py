"""The status of a live run, served over HTTP."""

import asyncio
import contextlib
import ipaddress
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from rl_bridge.errors import ConfigError, StatusError
from rl_bridge.interface import is_own_address
from rl_bridge.metrics.spans import SpanTotals
from rl_bridge.types import PolicyVersion

if TYPE_CHECKING:
    from prometheus_client.core import Metric

SERVING = "serving"
"""The state of a replica that takes calls."""


def _as_totals(value: Any) -> SpanTotals:
    return value if isinstance(value, SpanTotals) else SpanTotals.from_json(value)


Totals = Annotated[SpanTotals, PlainValidator(_as_totals), PlainSerializer(SpanTotals.as_json)]


class Row(BaseModel):
    """A part of a snapshot. Unknown keys, from a newer version of this package, are ignored."""

    model_config = ConfigDict(frozen=True)


class ReplicaRow(Row):
    """One replica of a service, and its processes (`pids`, one per rank).

    A restarted replica keeps its `id`. `host` is None while it does not run, `version` if it has no weights.
    """

    id: int
    state: str
    host: str | None = None
    pids: tuple[int, ...] = ()
    in_flight: int = 0
    restarts: int = 0
    version: PolicyVersion | None = None


class ServiceRow(Row):
    """A service and its replicas."""

    name: str
    replicas: tuple[ReplicaRow, ...]


class LeaseRow(Row):
    """A group leased to a rollout worker: the attempt (the first is 1), and its age in seconds."""

    group: int
    worker: str
    attempt: int
    age_s: float


class EventRow(Row):
    """An event of a service, or of one replica of it; `at` is in seconds since the epoch."""

    at: float
    service: str
    replica: int | None
    what: str


class StatusSnapshot(Row):
    """A run at one moment; `host` and `pid` are the controller's, times are seconds since the epoch.

    Attributes:
        version: How many of the `iterations` have been trained.
        served: The version that every serving generator has, or a newer one, as last recorded for admission.
        groups: The number of groups in each state of the ledger.
        spans: How each process has spent its time since it began.
        metrics: The newest iteration's finite metrics.
    """

    name: str
    folder: str
    host: str
    pid: int
    began: float
    taken: float
    iterations: int
    version: PolicyVersion
    served: PolicyVersion
    max_staleness: int
    services: tuple[ServiceRow, ...] = ()
    groups: Mapping[str, int] = Field(default_factory=dict)
    leases: tuple[LeaseRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    spans: Mapping[str, Totals] = Field(default_factory=dict)
    metrics: Mapping[str, float] = Field(default_factory=dict)

    @property
    def hosts(self) -> frozenset[str]:
        """Hosts with live processes, including the controller's."""
        replicas = (replica for service in self.services for replica in service.replicas)
        return frozenset(
            {self.host, *(replica.host for replica in replicas if replica.host and replica.pids)}
        )


logger = logging.getLogger(__name__)

PROCESS_STARTED_AT: Final = time.time()
"""Unix time at which this process was started, approximately. It tells runs apart; in containers pids do not."""

ADDRESS_FILE: Final = "status.json"
"""In the folder of a live run: the address where its status is served."""
LOOPBACK: Final = "127.0.0.1"
MAX_CALLERS: Final = 32
MAX_BYTES: Final = 16 << 20
MAX_HEAD_BYTES: Final = 8192
TIMEOUT_S: Final = 5.0
SNAPSHOT_MAX_AGE_S: Final = 0.2
"""How long a snapshot is cached, so that many clients cost the controller no more than a few."""


class StatusServer:
    """Serves snapshots over HTTP during a run: `GET /status` as JSON, `GET /metrics` in Prometheus's format.

    Args:
        host: The host to listen on.
        port: The port; 0 for any free one.
        snapshot: Takes a snapshot; called on the event loop, so it must not block.
        refresh: Awaited before each snapshot, to query remote state. It has deadlines of its own.
        folder: The run's folder, to write the address to; None writes it nowhere.
    """

    def __init__(
        self,
        host: str,
        port: int,
        snapshot: Callable[[], StatusSnapshot],
        *,
        refresh: Callable[[], Awaitable[None]] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._bind_address = host, port
        self._snapshot, self._refresh = snapshot, refresh
        self._file = None if folder is None else folder / ADDRESS_FILE
        self._callers: set[asyncio.Task[None]] = set()
        self._snapshot_lock = asyncio.Lock()
        self._body, self._taken_at = b"", -math.inf
        self.address = ""
        """HOST:PORT, once it listens."""

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(
                self._handle_connection, *self._bind_address, limit=MAX_HEAD_BYTES
            )
        except OSError as error:
            raise ConfigError(
                f"expected to serve the run's status on {format_address(*self._bind_address)}, got: "
                f"{error.strerror or error}; choose another address, or port 0 for any that is free"
            ) from error
        self.address = format_address(*self._server.sockets[0].getsockname()[:2])
        if self._file is not None:
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps({"address": self.address, "began": PROCESS_STARTED_AT}) + "\n")
            partial.replace(self._file)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)
        self._server.close()
        for caller in self._callers:
            caller.cancel()
        await asyncio.gather(*self._callers, return_exceptions=True)
        await self._server.wait_closed()

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        # Slow clients are disconnected. Cancellation at the end of the run is swallowed, as asyncio's streams would log
        # a cancelled task as an error.
        try:
            if len(self._callers) < MAX_CALLERS:
                self._callers.add(task)
                async with asyncio.timeout(TIMEOUT_S):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                    for chunk in await self._respond(head, str(writer.get_extra_info("sockname")[0])):
                        writer.write(chunk)
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (TimeoutError, ConnectionError, asyncio.CancelledError):
            pass
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # not a valid request
        finally:
            writer.transport.abort()
            self._callers.discard(task)

    async def _respond(self, head: str, listens_on: str) -> tuple[bytes, bytes]:
        """Return head and body of the response to a request with this head, received at this local address."""
        method, path, *_ = [*head.split("\r\n", 1)[0].split(" "), ""]
        kind, status = "application/json", "200 OK"
        if _is_dns_rebinding(head, listens_on):
            status = "421 Misdirected Request"
            body = b'{"error": "expected an address of this machine as Host"}\n'
        elif method != "GET" or path not in ("/", "/status", "/metrics"):
            status, body = "404 Not Found", b'{"error": "expected GET /status or GET /metrics"}\n'
        elif path == "/metrics":
            body = await self._take_snapshot()
            try:
                body = encode_metrics(StatusSnapshot.model_validate_json(body))
                kind = "text/plain; version=0.0.4; charset=utf-8"
            except ValidationError:  # the body says why no snapshot could be taken
                status = "503 Service Unavailable"
        else:
            body = await self._take_snapshot()
        headers = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        return f"HTTP/1.1 {status}\r\n{headers}\r\n".encode(), body

    async def _take_snapshot(self) -> bytes:
        async with self._snapshot_lock:
            if time.monotonic() - self._taken_at >= SNAPSHOT_MAX_AGE_S:
                try:
                    if self._refresh is not None:
                        await self._refresh()
                    text = self._snapshot().model_dump_json()
                except Exception as error:  # the run goes on; the client gets the error
                    logger.exception("the run's status could not be taken")
                    text = json.dumps({"error": f"{type(error).__name__}: {error}"})
                self._body, self._taken_at = text.encode() + b"\n", time.monotonic()
            return self._body


class _Collector:
    """A collector of prometheus_client for one snapshot."""

    def __init__(self, snapshot: StatusSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> "Iterator[Metric]":
        """Yield every metric."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshot = self._snapshot

        def family(kind: Any, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Any:
            metric = kind(f"ropewalk_run_{name}", text, labels=("run", *labels))
            for label_values, value in values.items():
                metric.add_metric((snapshot.name, *label_values), value)
            return metric

        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield family(gauge, "iterations", "Iterations that the run is to train.", {(): snapshot.iterations})
        yield family(gauge, "version", "Iterations that are trained.", {(): snapshot.version})
        yield family(
            gauge, "served_version", "Weights that every serving generator holds.", {(): snapshot.served}
        )
        yield family(gauge, "elapsed_seconds", "Since the run began.", {(): snapshot.taken - snapshot.began})
        values = {(state,): float(count) for state, count in snapshot.groups.items()}
        yield family(gauge, "groups", "Groups in each state, by the ledger.", values, "state")
        oldest_s = max((lease.age_s for lease in snapshot.leases), default=0.0)
        yield family(gauge, "oldest_lease_seconds", "Of the groups under way, the oldest.", {(): oldest_s})
        replicas = [(service.name, replica) for service in snapshot.services for replica in service.replicas]
        # After its first word a state may have a free-text reason.
        states = Counter((name, replica.state.split()[0]) for name, replica in replicas)
        yield family(gauge, "replicas", "Replicas of each service in each state.", states, "service", "state")
        in_flight, restarts = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
        for name, replica in replicas:
            in_flight[(name,)] += replica.in_flight
            restarts[(name,)] += replica.restarts
        yield family(gauge, "calls_in_flight", "Calls that a service is at.", in_flight, "service")
        yield family(counter, "restarts", "Restarts of a service's replicas.", restarts, "service")
        seconds: dict[tuple[str, ...], float] = {}
        for process, totals in snapshot.spans.items():
            seconds |= {(process, "work", word): value for word, value in totals.work.items()}
            seconds |= {(process, "idle", word): value for word, value in totals.idle.items()}
            seconds[process, "unaccounted", ""] = totals.unaccounted_s
        text = "Wall time of each process, by what it was at."
        yield family(counter, "process_seconds", text, seconds, "process", "kind", "what")
        cpu = {(process,): totals.cpu_s for process, totals in snapshot.spans.items()}
        yield family(counter, "process_cpu_seconds", "Processor time of each process.", cpu, "process")
        newest = {(name,): value for name, value in snapshot.metrics.items()}
        yield family(
            gauge, "metric", "The newest iteration's metrics, by their names in the log.", newest, "name"
        )


def encode_metrics(snapshot: StatusSnapshot) -> bytes:
    """Return a snapshot as text in Prometheus's format."""
    from prometheus_client.exposition import generate_latest

    registry: Any = _Collector(snapshot)  # `generate_latest` only needs `collect` of a registry
    return generate_latest(registry)


async def request_status(address: str, *, timeout_s: float = TIMEOUT_S) -> StatusSnapshot:
    """Request the status of a run at HOST:PORT.

    Raises:
        ConfigError: The address is not HOST:PORT.
        StatusError: No run answers there in time.
    """
    host, port = parse_address(address)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_BYTES)
            with contextlib.closing(writer.transport):
                writer.write(f"GET /status HTTP/1.1\r\nHost: {format_address(host, port)}\r\n\r\n".encode())
                response = await reader.read(MAX_BYTES)
                while (more := await reader.read(MAX_BYTES)) and len(response) < MAX_BYTES:
                    response += more
    except TimeoutError:
        raise StatusError(f"expected an answer from {address} within {timeout_s:g} s, got none") from None
    except OSError as error:
        raise StatusError(
            f"expected a run's status at {address}, got: {getattr(error, 'strerror', None) or error}; "
            "is the run under way, and is this the address in its folder's status.json?"
        ) from error
    _, end, body = response.partition(b"\r\n\r\n")
    try:
        return StatusSnapshot.model_validate_json(body)
    except ValidationError:
        answer = body if end else response
        raise StatusError(f"expected a run's status from {address}, got {answer[:200]!r}") from None


def _is_dns_rebinding(head: str, listens_on: str) -> bool:
    """Whether a request may be DNS rebinding: it came in on loopback, for a name with a dot, no IP address."""
    host_headers = [line[5:].strip() for line in head.split("\r\n") if line[:5].lower() == "host:"]
    host = (host_headers[0] if host_headers else "").rpartition("]")[0][1:] or (
        host_headers[0] if host_headers else ""
    ).partition(":")[0]
    if not ipaddress.ip_address(listens_on).is_loopback or "." not in host:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def choose_status_host(host: str, *, is_local: bool) -> str:
    """Return the host to serve a run's status on, given the configured one.

    A configuration for a cluster names the cluster's controller. If all of a run's processes are on one machine
    (`is_local`) that does not have this address, the status is served on loopback instead.
    """
    if not is_local or is_own_address(host):
        return host
    logger.warning("%s is no address of this machine: the run's status is served on %s", host, LOOPBACK)
    return LOOPBACK


def parse_address(address: str) -> tuple[str, int]:
    """Parse HOST:PORT into host and port; an IPv6 address is in brackets. ConfigError if it is not an address."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (colon and bare and port.isdecimal() and 0 < int(port) < 65536) or (":" in bare) != (bare != host):
        raise ConfigError(f"expected an address as HOST:PORT or [IPV6]:PORT, got {address!r}")
    return bare, int(port)


def format_address(host: str, port: int) -> str:
    """Format a host and a port as HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_served_address(folder: Path) -> tuple[str, float] | None:
    """Return where a run's status is served, as its folder says, and when its controller began; None if absent."""
    try:
        served = json.loads((folder / ADDRESS_FILE).read_text())
        return str(served["address"]), float(served["began"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
