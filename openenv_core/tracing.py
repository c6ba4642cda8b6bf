"""OpenTelemetry: one trace an episode, through rollout, client and server (docs/observing.md).

It is on where OpenTelemetry's own environment variables say where spans go, or the program has a tracer provider. Off,
nothing of OpenTelemetry is imported.
"""

import asyncio
import functools
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, Protocol

from openenv_core.errors import ConfigurationError, installed_with

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

MAX_ERROR: Final = 1000
"""Characters of an error that a span tells."""

FLUSH_TIMEOUT_S: Final = 5.0

EXPORTER: Final = "OTEL_TRACES_EXPORTER"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@functools.cache
def tracer() -> "Tracer | None":
    """Return what makes spans in this process; None where tracing is off.

    The program's own provider is used where it has set one (`opentelemetry-instrument` does); otherwise one is made
    as the OTEL_* variables say.

    Raises:
        ConfigurationError: They ask for what is not installed.
    """
    exporters = _first(EXPORTER) or ("otlp" if _first(*_ENDPOINTS) else "")
    loaded = sys.modules.get("opentelemetry.trace")
    provided = loaded is not None and not isinstance(loaded.get_tracer_provider(), loaded.ProxyTracerProvider)
    if exporters == "none" or _first("OTEL_SDK_DISABLED").lower() == "true" or not (exporters or provided):
        return None
    with installed_with("otel", "OpenTelemetry's SDK, which OTEL_* variables ask for"):
        from opentelemetry import trace

        if not provided:
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
    """Make an exporter by its name, as packages of OpenTelemetry's declare theirs."""
    if name == "otlp":
        name = "otlp_proto_grpc" if _first(*_PROTOCOLS) == "grpc" else "otlp_proto_http"
    for entry in entry_points(group="opentelemetry_traces_exporter", name=name):
        return entry.load()()
    text = f"expected {EXPORTER} to name an exporter that is installed, got {name!r}; pip install 'ropewalk[otel]'"
    raise ConfigurationError(f"{text} brings console and otlp over HTTP")


async def flush() -> None:
    """Send the spans that wait to be sent, within a limit; for a process that does not come to its exit handlers."""
    if tracer() is None:
        return
    from opentelemetry import trace

    # The SDK's, or whatever the program has set.
    force_flush = getattr(trace.get_tracer_provider(), "force_flush", None)
    if force_flush is not None:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(force_flush), FLUSH_TIMEOUT_S)


@contextmanager
def traced(name: str, **attributes: str | int | float) -> Iterator[None]:
    """Make what is done in the block a span, where tracing is on; what it raises is told."""
    if (made_by := tracer()) is None:
        yield
        return
    named = {f"ropewalk.{key}": value for key, value in attributes.items()}
    with made_by.start_as_current_span(name, attributes=named):
        yield


def current_traceparent() -> str | None:
    """Return the W3C traceparent of the span that this is done in; None where there is none, or tracing is off."""
    if tracer() is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent")


class EpisodeSpans:
    """The spans of a client's episodes, where tracing is on: one an episode, and in it one a request."""

    def __init__(self) -> None:
        self._tracer = tracer()
        self._episode: Span | None = None
        self._last_ns = 0

    def request(self, name: str, work: Awaitable[dict[str, Any]]) -> Awaitable[dict[str, Any]]:
        """Return the data of a reply, awaited in a span; a reset begins an episode, and what is done ends it."""
        return work if self._tracer is None else self._request(self._tracer, name, work)

    async def _request(self, made_by: "Tracer", name: str, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        from opentelemetry import trace

        if name == "reset" or self._episode is None:
            self.end()
            self._episode = made_by.start_span("episode")
        episode = trace.set_span_in_context(self._episode)
        try:
            with made_by.start_as_current_span(name, episode, trace.SpanKind.CLIENT) as span:
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
        """End the episode's span, if there is one, as of its last request: who leaves an episode may say so late."""
        if self._episode is not None:
            self._episode.end(self._last_ns)
            self._episode = None


class _Timed(Protocol):
    spent_s: float


@contextmanager
def served_span(
    traceparent: str | None, name: str, environment: str, runner: _Timed, began: float
) -> Iterator[Callable[[str], None]]:
    """Make a request that is answered in the block a part of its client's trace, where there is one.

    Spans that an environment makes in it are parts of it. The time in the environment gets a span of its own, that ends
    as this one does; what the block raises is told.

    Args:
        traceparent: The client's, if it says so.
        name: Of the request.
        environment: What is served.
        runner: Notes the seconds that the request was in the environment.
        began: When the request came, by `time.perf_counter`.

    Yields:
        What notes an error that the client is told.
    """
    if traceparent is None or (made_by := tracer()) is None:
        yield lambda error: None
        return
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    waited_s = time.perf_counter() - began  # first: who is stopped between the two is late, not early
    began_ns = time.time_ns() - int(waited_s * 1e9)
    parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    attributes = {"ropewalk.environment": environment}
    span = made_by.start_span(f"serve {name}", parent, trace.SpanKind.SERVER, attributes, start_time=began_ns)
    runner.spent_s = 0.0
    try:
        with trace.use_span(span):
            yield lambda error: span.set_status(trace.StatusCode.ERROR, error[:MAX_ERROR])
    finally:
        now = time.time_ns()
        if runner.spent_s:
            start = max(began_ns, now - int(runner.spent_s * 1e9))
            inside = trace.set_span_in_context(span)
            made_by.start_span(f"environment {name}", inside, start_time=start).end(now)
        span.end(now)
