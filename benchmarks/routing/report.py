"""Figures as Markdown tables, and what must show."""

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
    WAYS,
)
from benchmarks.wire.bars import Bar
from benchmarks.wire.figures import Figures
from benchmarks.wire.report import table, verdicts


def bars(figures: Figures) -> Iterator[Bar]:
    """Yield every bar that this run has the figures for."""
    for load in LOADS:
        for figure in (MAKESPAN, P99):
            turns, least = (figures.median(figure, way, load) for way in (ROUND_ROBIN, LEAST_LOADED))
            if turns is not None and least is not None:
                what = f"{figure.removesuffix(' s')}, {load}: least loaded / round robin"
                yield Bar(what, least / turns, 1.0, "at most")


def report(figures: Figures) -> str:
    """Return the tables of a run, the bars, and what could not be measured."""
    rows = []
    for load in LOADS:
        for way in WAYS:
            cells = [figures.median(figure, way, load) for figure in (MAKESPAN, P99, MEAN)]
            if None not in cells:
                rows.append((load, way, *(f"{cell:.3f}" for cell in cells)))
    parts = ["### Jobs\n\n" + table(("replicas", "routing", MAKESPAN, P99, MEAN), rows)]
    routed, bare = (figures.median(CALL, way) for way in (ROUTED, BARE))
    if routed is not None and bare is not None:
        calls = [(ROUTED, f"{routed:,.0f}", f"{routed / bare:.2f}"), (BARE, f"{bare:,.0f}", "1")]
        parts.append("### Empty calls, one after the other\n\n" + table(("way", CALL, "over bare"), calls))
    parts += verdicts(figures, bars(figures))
    return "\n\n".join(parts)
