"""Where the figures of a run go."""

from rl_bridge.metrics.sinks import JsonlSink, MetricsLog, Sink, TensorBoardSink, rewind

__all__ = ["JsonlSink", "MetricsLog", "Sink", "TensorBoardSink", "rewind"]
