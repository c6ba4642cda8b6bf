"""Spans of this process, kept in memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from openenv_core import tracing


@contextmanager
def recorded_spans() -> Iterator[InMemorySpanExporter]:
    """Turn tracing on while the block runs."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tracing.VARIABLE, "1")
        patch.setattr(trace, "get_tracer_provider", lambda: provider)
        tracing.tracer.cache_clear()
        try:
            yield exporter
        finally:
            tracing.tracer.cache_clear()


def lines(exporter: InMemorySpanExporter) -> list[list[str]]:
    """Return, a trace each, its spans as paths from the root, in the order in which they began."""
    spans = sorted(exporter.get_finished_spans(), key=lambda span: (span.start_time, span.context.span_id))
    by_id = {span.context.span_id: span for span in spans}
    traces: dict[int, list[str]] = {}
    for span in spans:
        path, at = span.name, span
        while at.parent is not None and (parent := by_id.get(at.parent.span_id)) is not None:
            assert parent.start_time <= at.start_time <= at.end_time <= parent.end_time, at.name
            path, at = f"{parent.name} > {path}", parent
        traces.setdefault(span.context.trace_id, []).append(path)
    return list(traces.values())
