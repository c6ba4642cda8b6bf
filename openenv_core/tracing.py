"""OpenTelemetry: one trace an episode, through rollout, client and server (docs/observing.md).

It is on where the environment variable ROPEWALK_OTEL says so. Off, nothing of OpenTelemetry is imported.
"""

import functools
import os
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from openenv_core.errors import installed_with

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

VARIABLE: Final = "ROPEWALK_OTEL"
_ON: Final = ("1", "true", "yes", "on")


@functools.cache
def tracer() -> "Tracer | None":
    """Return what makes spans in this process; None where tracing is off.

    The program's own provider is used where it has set one (`opentelemetry-instrument` does); otherwise spans go to
    where OTEL_EXPORTER_OTLP_ENDPOINT says, under the name in OTEL_SERVICE_NAME.

    Raises:
        ConfigurationError: OpenTelemetry is not installed.
    """
    if os.environ.get(VARIABLE, "").strip().lower() not in _ON:
        return None
    with installed_with("otel", f"OpenTelemetry for {VARIABLE}", "opentelemetry"):
        from opentelemetry import trace

        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            provider = TracerProvider()
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            trace.set_tracer_provider(provider)
        return trace.get_tracer("ropewalk")


@contextmanager
def traced(name: str, **attributes: str | int | float) -> Iterator[None]:
    """Make what is done in the block a span, where tracing is on; what it raises is told."""
    if (made_by := tracer()) is None:
        yield
        return
    with made_by.start_as_current_span(name, attributes=_named(attributes)):
        yield


def current_traceparent() -> str | None:
    """Return the W3C traceparent of the span that this is done in; None where there is none."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent")


class EpisodeSpans:
    """The spans of a client's episodes: one an episode, and in it one a request.

    Args:
        made_by: Makes them.
    """

    def __init__(self, made_by: "Tracer") -> None:
        self._tracer = made_by
        self._episode: Span | None = None
        self._last_ns = 0

    async def request(self, name: str, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """Await the data of a reply in a span; a reset begins an episode, and what is done ends it."""
        from opentelemetry import trace

        if name == "reset" or self._episode is None:
            self.end()
            self._episode = self._tracer.start_span("episode")
        episode = trace.set_span_in_context(self._episode)
        try:
            with self._tracer.start_as_current_span(name, episode, trace.SpanKind.CLIENT) as span:
                data = await work
                done = data.get("done") is True
                span.set_attributes(_named({"done": done, "reward": data.get("reward")}))
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


def episode_spans() -> EpisodeSpans | None:
    """Return what makes the spans of one client; None where tracing is off."""
    return None if (made_by := tracer()) is None else EpisodeSpans(made_by)


class ServedSpan:
    """A request that a server answers, as a part of its client's trace.

    Args:
        made_by: Makes spans.
        traceparent: The client's.
        name: Of the request.
        environment: What is served.
        began: When the request came, by `time.perf_counter`.
    """

    def __init__(
        self, made_by: "Tracer", traceparent: str, name: str, environment: str, began: float
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = made_by
        self._name = name
        self._began_ns = _epoch_ns(began)
        self._span = made_by.start_span(
            f"serve {name}",
            TraceContextTextMapPropagator().extract({"traceparent": traceparent}),
            trace.SpanKind.SERVER,
            _named({"environment": environment}),
            start_time=self._began_ns,
        )
        self.entered = trace.use_span(self._span)
        """The context in which it is answered: spans of an environment that makes some are a part of it."""

    def end(self, spent_s: float, error: bool) -> None:
        """End it.

        Args:
            spent_s: Seconds of it in the environment, which get a span of their own, that ends as this one does.
            error: The client is told of an error.
        """
        from opentelemetry import trace

        now = time.time_ns()
        inner = self._tracer.start_span(
            f"environment {self._name}",
            trace.set_span_in_context(self._span),
            start_time=max(self._began_ns, now - int(spent_s * 1e9)),
        )
        inner.end(now)
        if error:
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end(now)


def _epoch_ns(moment: float) -> int:
    elapsed_s = (
        time.perf_counter() - moment
    )  # first: a process that is stopped between the two is late, not early
    return time.time_ns() - int(elapsed_s * 1e9)


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes under the names that spans of ours have them by, those without a plain value left out."""
    return {
        f"ropewalk.{name}": value
        for name, value in attributes.items()
        if isinstance(value, str | bool | int | float)
    }
