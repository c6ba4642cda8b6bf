"""Reports as Markdown tables, and the bounds that results are checked against."""

from collections.abc import Iterator

from benchmarks.routing.measures import (
    BARE,
    CALL,
    LEAST_LOADED,
    LOADS,
    MAKESPAN,
    MEAN,
    P99,
    ROUND_ROBIN,
    ROUTED,
    STRATEGIES,
)
from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.report import table, verdicts


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for load in LOADS:
        for metric in (MAKESPAN, P99):
            turns, least = (
                measurements.median(metric, strategy, load) for strategy in (ROUND_ROBIN, LEAST_LOADED)
            )
            if turns is not None and least is not None:
                label = f"{metric.removesuffix(' s')}, {load}: least loaded / round robin"
                yield Bar(label, least / turns, 1.0, "at most")


def report(measurements: Measurements) -> str:
    """Return the tables of a run, the bars, and what could not be measured."""
    rows = []
    for load in LOADS:
        for strategy in STRATEGIES:
            cells = [measurements.median(metric, strategy, load) for metric in (MAKESPAN, P99, MEAN)]
            if None not in cells:
                rows.append((load, strategy, *(f"{cell:.3f}" for cell in cells)))
    parts = ["### Jobs\n\n" + table(("replicas", "routing", MAKESPAN, P99, MEAN), rows)]
    routed, bare = (measurements.median(CALL, strategy) for strategy in (ROUTED, BARE))
    if routed is not None and bare is not None:
        calls = [(ROUTED, f"{routed:,.0f}", f"{routed / bare:.2f}"), (BARE, f"{bare:,.0f}", "1")]
        parts.append("### Empty calls, one after the other\n\n" + table(("way", CALL, "over bare"), calls))
    parts += verdicts(measurements, bars(measurements))
    return "\n\n".join(parts)
