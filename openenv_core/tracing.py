"""OpenTelemetry: one trace per episode, through rollout, client and server (docs/observing.md).

Tracing is on if OpenTelemetry's environment variables name an exporter or endpoint, or the program has set a tracer
provider. Otherwise OpenTelemetry is not imported.
"""

import asyncio
import functools
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from openenv_core.errors import ConfigurationError, installed_with

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

MAX_ERROR: Final = 1000
"""Maximum characters of an error in a span."""

FLUSH_TIMEOUT_S: Final = 5.0

EXPORTER: Final = "OTEL_TRACES_EXPORTER"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@functools.cache
def tracer() -> "Tracer | None":
    """Return this process's tracer; None if tracing is off.

    Uses the program's own provider if it has set one (`opentelemetry-instrument` does); otherwise creates one from
    the OTEL_* variables.

    Raises:
        ConfigurationError: The variables require a package that is not installed.
    """
    exporters = _first(EXPORTER) or ("otlp" if _first(*_ENDPOINTS) else "")
    api = sys.modules.get("opentelemetry.trace")
    has_provider = api is not None and not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)
    if (
        exporters == "none"
        or _first("OTEL_SDK_DISABLED").lower() == "true"
        or not (exporters or has_provider)
    ):
        return None
    with installed_with("otel", "OpenTelemetry's SDK, which OTEL_* variables ask for"):
        from opentelemetry import trace

        if not has_provider:
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            provider = TracerProvider()
            for name in exporters.split(","):
                provider.add_span_processor(BatchSpanProcessor(_exporter(name.strip())))
            trace.set_tracer_provider(provider)
        return trace.get_tracer("ropewalk")


def _first(*variables: str) -> str:
    return next(filter(None, (os.environ.get(name, "").strip() for name in variables)), "")


def _exporter(name: str) -> Any:
    """Create an exporter by the name of its entry point."""
    from importlib.metadata import entry_points  # which takes longer to import than all of a client's modules

    if name == "otlp":
        name = "otlp_proto_grpc" if _first(*_PROTOCOLS) == "grpc" else "otlp_proto_http"
    for entry in entry_points(group="opentelemetry_traces_exporter", name=name):
        return entry.load()()
    text = f"expected {EXPORTER} to name an exporter that is installed, got {name!r}; pip install 'ropewalk[otel]'"
    raise ConfigurationError(f"{text} brings console and otlp over HTTP")


async def flush() -> None:
    """Export pending spans, for at most `FLUSH_TIMEOUT_S`; for processes that exit without running exit handlers."""
    if tracer() is None:
        return
    from opentelemetry import trace

    # A provider that the program has set need not have it.
    force_flush = getattr(trace.get_tracer_provider(), "force_flush", None)
    if force_flush is not None:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(force_flush), FLUSH_TIMEOUT_S)


@contextmanager
def traced(name: str, **attributes: str | int | float) -> Iterator[None]:
    """Run the block in a span, if tracing is on. An exception of the block is recorded."""
    if (active_tracer := tracer()) is None:
        yield
        return
    span_attributes = {f"ropewalk.{key}": value for key, value in attributes.items()}
    with active_tracer.start_as_current_span(name, attributes=span_attributes):
        yield


def current_traceparent() -> str | None:
    """Return the W3C traceparent of the current span; None if there is none or tracing is off."""
    if tracer() is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent")


class EpisodeSpans:
    """The spans of a client's episodes, if tracing is on: one per episode, with a child span per request."""

    def __init__(self) -> None:
        self._tracer = tracer()
        self._episode: Span | None = None
        self._last_ns = 0

    def request(self, name: str, work: Awaitable[dict[str, Any]]) -> Awaitable[dict[str, Any]]:
        """Return an awaitable of a reply's data, run in a span. A reset starts an episode's span; `done` ends it."""
        return work if self._tracer is None else self._request(self._tracer, name, work)

    async def _request(
        self, active_tracer: "Tracer", name: str, work: Awaitable[dict[str, Any]]
    ) -> dict[str, Any]:
        from opentelemetry import trace

        if name == "reset" or self._episode is None:
            self.end()
            self._episode = active_tracer.start_span("episode")
        episode = trace.set_span_in_context(self._episode)
        try:
            with active_tracer.start_as_current_span(name, episode, trace.SpanKind.CLIENT) as span:
                data = await work
                done, reward = data.get("done") is True, data.get("reward")
                span.set_attribute("ropewalk.done", done)
                if isinstance(reward, int | float):
                    span.set_attribute("ropewalk.reward", reward)
        finally:
            self._last_ns = time.time_ns()
        if done:
            self.end()
        return data

    def end(self) -> None:
        """End the episode's span, if any, at the time of its last request: callers may abandon an episode late."""
        if self._episode is not None:
            self._episode.end(self._last_ns)
            self._episode = None


class _Timed(Protocol):
    spent_s: float


@contextmanager
def served_span(
    traceparent: str | None, name: str, environment: str, runner: _Timed, began: float
) -> Iterator[Callable[[str], None]]:
    """Run the block, which handles a request, in a span of the client's trace, if any.

    Spans that the environment makes in the block are its children. The time in the environment gets a child span that
    ends with this one. An exception of the block is recorded.

    Args:
        traceparent: The client's traceparent, if it sent one.
        name: Name of the request.
        environment: Name of the environment.
        runner: Records in `spent_s` the seconds that the request spent in the environment.
        began: When the request arrived, by `time.perf_counter`.

    Yields:
        A function that records the text of an error reply.
    """
    if traceparent is None or (active_tracer := tracer()) is None:
        yield lambda error: None
        return
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    waited_s = time.perf_counter() - began  # first: a delay in between makes the span late, not early
    began_ns = time.time_ns() - int(waited_s * 1e9)
    parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    attributes = {"ropewalk.environment": environment}
    span = active_tracer.start_span(
        f"serve {name}", parent, trace.SpanKind.SERVER, attributes, start_time=began_ns
    )
    runner.spent_s = 0.0
    try:
        with trace.use_span(span):
            yield lambda error: span.set_status(trace.StatusCode.ERROR, error[:MAX_ERROR])
    finally:
        now = time.time_ns()
        if runner.spent_s:
            start = max(began_ns, now - int(runner.spent_s * 1e9))
            context = trace.set_span_in_context(span)
            active_tracer.start_span(f"environment {name}", context, start_time=start).end(now)
        span.end(now)
