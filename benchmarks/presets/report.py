"""Figures as Markdown tables, and what must show."""

from collections.abc import Iterator
from typing import Final

from benchmarks.presets.measures import CLIPPED, EXACT, HANDS, ITERATION, RATIO, SECONDS
from benchmarks.wire.bars import Bar
from benchmarks.wire.figures import Figures
from benchmarks.wire.report import table, verdicts

BLIND: Final = -0.064
"""The exact return of the best rule that never looks at the dealer's card."""
SECONDS_OF_A_RUN: Final = 600.0
MOVES: Final = 1e-4
"""What a ratio that is only rounding does not reach."""


def bars(figures: Figures) -> Iterator[Bar]:
    """Yield every bar that this run has the figures for."""
    for name, load in _runs(figures):
        what = f"{name}, {load}"
        ratios, clipped = figures.values[RATIO, name, load], figures.values[CLIPPED, name, load]
        if exact := figures.values.get((EXACT, name, load)):
            yield Bar(f"{what}: exact return", exact[-1], BLIND, "at least")
        yield Bar(f"{what}: seconds", figures.values[SECONDS, name, load][-1], SECONDS_OF_A_RUN, "at most")
        yield Bar(
            f"{what}: mean ratio, at most so far from 1", max(abs(r - 1) for r in ratios), MOVES, "at least"
        )
        yield Bar(f"{what}: share clipped, the largest", max(clipped), MOVES, "at least")
        yield Bar(f"{what}: share clipped, the smallest", min(clipped), 1 - MOVES, "at most")


def report(figures: Figures) -> str:
    """Return the tables of a run, the bars, and what could not be measured."""
    return "\n\n".join(
        ["### Runs\n\n" + _overview(figures), *_curves(figures), *verdicts(figures, bars(figures), ".4g")]
    )


def _overview(figures: Figures) -> str:
    rows = []
    for name, load in _runs(figures):
        ratios, clipped = figures.values[RATIO, name, load], figures.values[CLIPPED, name, load]
        exact = figures.values.get((EXACT, name, load), [])
        rows.append(
            (
                name,
                load,
                f"{exact[-1]:.4f}" if exact else "",
                str(len(ratios)),
                f"{figures.values[HANDS, name, load][-1]:,.0f}",
                f"{figures.values[SECONDS, name, load][-1]:.0f}",
                f"{min(ratios):.4f} to {max(ratios):.4f}",
                f"{min(clipped):.2%} to {max(clipped):.2%}",
            )
        )
    return table(
        ("preset", "run", "exact return", "iterations", "hands", "seconds", "mean ratio", "clipped"), rows
    )


def _curves(figures: Figures) -> Iterator[str]:
    rows = []
    for name, load in _runs(figures):
        exact = figures.values.get((EXACT, name, load), [])
        iterations = figures.values.get((ITERATION, name, load), [])
        points = ", ".join(f"{i:.0f}: {e:.3f}" for i, e in zip(iterations, exact, strict=True))
        rows.append((name, load, points))
    if rows:
        yield "### Exact return by iteration\n\n" + table(("preset", "run", "curve"), rows)


def _runs(figures: Figures) -> list[tuple[str, str]]:
    return [(who, load) for figure, who, load in figures.values if figure == RATIO]
