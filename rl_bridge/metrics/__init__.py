"""What a run measures: metrics and where they go, and how each process spends its time."""

from rl_bridge.metrics.sinks import (
    EnvironmentSink,
    JsonlSink,
    MetricsLog,
    Sink,
    TensorBoardSink,
    environment_prefix,
    rewind,
)
from rl_bridge.metrics.spans import PROCESS_SPANS, Spans, SpanTotals, SpanWindow, by_role, span

__all__ = [
    "PROCESS_SPANS",
    "EnvironmentSink",
    "JsonlSink",
    "MetricsLog",
    "Sink",
    "SpanTotals",
    "SpanWindow",
    "Spans",
    "TensorBoardSink",
    "by_role",
    "environment_prefix",
    "rewind",
    "span",
]
