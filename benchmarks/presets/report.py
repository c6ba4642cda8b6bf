"""Reports as Markdown tables, and the bounds that results are checked against."""

from collections.abc import Iterator
from typing import Final

from benchmarks.presets.measures import CLIPPED, EXACT, HANDS, ITERATION, RATIO, SECONDS
from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.report import table, verdicts

BLIND: Final = -0.064
"""The exact return of the best policy that ignores the dealer's card."""
SECONDS_OF_A_RUN: Final = 600.0
MOVES: Final = 1e-4
"""Threshold above the deviation that rounding alone causes in a ratio."""


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for name, load in _runs(measurements):
        run = f"{name}, {load}"
        ratios, clipped = measurements.values[RATIO, name, load], measurements.values[CLIPPED, name, load]
        if exact := measurements.values.get((EXACT, name, load)):
            yield Bar(f"{run}: exact return", exact[-1], BLIND, "at least")
        yield Bar(
            f"{run}: seconds", measurements.values[SECONDS, name, load][-1], SECONDS_OF_A_RUN, "at most"
        )
        yield Bar(
            f"{run}: mean ratio, at most so far from 1", max(abs(r - 1) for r in ratios), MOVES, "at least"
        )
        yield Bar(f"{run}: share clipped, the largest", max(clipped), MOVES, "at least")
        yield Bar(f"{run}: share clipped, the smallest", min(clipped), 1 - MOVES, "at most")


def report(measurements: Measurements) -> str:
    """Return the tables of a run, the bars, and what could not be measured."""
    return "\n\n".join(
        [
            "### Runs\n\n" + _overview(measurements),
            *_curves(measurements),
            *verdicts(measurements, bars(measurements), ".4g"),
        ]
    )


def _overview(measurements: Measurements) -> str:
    rows = []
    for name, load in _runs(measurements):
        ratios, clipped = measurements.values[RATIO, name, load], measurements.values[CLIPPED, name, load]
        exact = measurements.values.get((EXACT, name, load), [])
        rows.append(
            (
                name,
                load,
                f"{exact[-1]:.4f}" if exact else "",
                str(len(ratios)),
                f"{measurements.values[HANDS, name, load][-1]:,.0f}",
                f"{measurements.values[SECONDS, name, load][-1]:.0f}",
                f"{min(ratios):.4f} to {max(ratios):.4f}",
                f"{min(clipped):.2%} to {max(clipped):.2%}",
            )
        )
    return table(
        ("preset", "run", "exact return", "iterations", "hands", "seconds", "mean ratio", "clipped"), rows
    )


def _curves(measurements: Measurements) -> Iterator[str]:
    rows = []
    for name, load in _runs(measurements):
        exact = measurements.values.get((EXACT, name, load), [])
        iterations = measurements.values.get((ITERATION, name, load), [])
        points = ", ".join(f"{i:.0f}: {e:.3f}" for i, e in zip(iterations, exact, strict=True))
        rows.append((name, load, points))
    if rows:
        yield "### Exact return by iteration\n\n" + table(("preset", "run", "curve"), rows)


def _runs(measurements: Measurements) -> list[tuple[str, str]]:
    return [(subject, load) for metric, subject, load in measurements.values if metric == RATIO]
