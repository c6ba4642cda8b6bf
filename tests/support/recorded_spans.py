"""Records spans: those of this process in memory, and those that processes send to a collector."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest
from local_http import QuietHandler, running
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from openenv_core import tracing


@contextmanager
def recorded_spans() -> Iterator[InMemorySpanExporter]:
    """Install a tracer provider with an in-memory exporter while the block runs."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "get_tracer_provider", lambda: provider)
        tracing.tracer.cache_clear()
        try:
            yield exporter
        finally:
            tracing.tracer.cache_clear()


class Recorded(NamedTuple):
    """A span, and the service that created it."""

    trace: bytes | int
    id: bytes | int
    parent: bytes | int | None
    name: str
    start: int
    end: int
    service: str = ""


@contextmanager
def collector() -> Iterator[tuple[str, list[Recorded]]]:
    """Receive spans over OTLP; yields the address, and the received spans."""
    taken: list[Recorded] = []

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.read_body()
            # Other libraries in these processes, such as Monarch, send theirs too.
            ours = ExportTraceServiceRequest.FromString(body if self.path == "/v1/traces" else b"")
            for sent in ours.resource_spans:
                resource_attributes = {one.key: one.value.string_value for one in sent.resource.attributes}
                scopes = (scope for scope in sent.scope_spans if scope.scope.name == "ropewalk")
                for span in (span for scope in scopes for span in scope.spans):
                    ids = span.trace_id, span.span_id, span.parent_span_id
                    times = span.start_time_unix_nano, span.end_time_unix_nano
                    taken.append(Recorded(*ids, span.name, *times, resource_attributes["service.name"]))
            self.reply(200)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with running(server):
        yield f"http://127.0.0.1:{server.server_port}", taken


def recorded(exporter: InMemorySpanExporter) -> list[Recorded]:
    """Return our spans in memory: newer releases of FastAPI record their own."""
    spans = exporter.get_finished_spans()
    return [_recorded(span) for span in spans if span.instrumentation_scope.name == "ropewalk"]


def _recorded(span: Any) -> Recorded:
    parent = None if span.parent is None else span.parent.span_id
    return Recorded(
        span.context.trace_id, span.context.span_id, parent, span.name, span.start_time, span.end_time
    )


def lines(spans: Sequence[Recorded]) -> list[list[str]]:
    """Return the spans of each trace as paths from the root, in order of their start."""
    by_id = {span.id: span for span in spans}
    paths: list[tuple[int, int, Recorded, str]] = []
    for span in spans:
        path, at, depth = span.name, span, 0
        while (parent := by_id.get(at.parent)) is not None:
            assert parent.start <= at.start <= at.end <= parent.end, at.name
            path, at, depth = f"{parent.name} > {path}", parent, depth + 1
        paths.append((span.start, depth, span, path))
    traces: dict[Any, list[str]] = {}
    for _, _, span, path in sorted(paths, key=lambda one: one[:2]):  # may start with the parent
        traces.setdefault(span.trace, []).append(path)
    return list(traces.values())


def request(name: str, within: str = "episode") -> list[str]:
    """Return the paths of one request of an episode."""
    to = f"{within} > {name}"
    return [to, f"{to} > serve {name}", f"{to} > serve {name} > environment {name}"]
