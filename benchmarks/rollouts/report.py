"""Figures as Markdown tables, and what must show."""

from collections.abc import Iterator

from benchmarks.rollouts.measures import FAILED, IN_FLIGHT, LEFT_OUT, RATE, load
from benchmarks.wire.bars import Bar
from benchmarks.wire.figures import Figures
from benchmarks.wire.report import table, verdicts

MANY = 256


def bars(figures: Figures) -> Iterator[Bar]:
    """Yield every bar that this run has the figures for: many at once against one server, and no failure."""
    for game in figures.contestants(load(MANY)):
        for figure, bound in ((FAILED, 0.0), (LEFT_OUT, 0.0)):
            worst = max(figures.values[figure, game, load(MANY)])
            yield Bar(f"{game}, {load(MANY)}: {figure}", worst, bound, "at most")
        fewest = min(figures.values[IN_FLIGHT, game, load(MANY)])
        yield Bar(f"{game}, {load(MANY)}: {IN_FLIGHT}", fewest, MANY, "at least")


def report(figures: Figures) -> str:
    """Return the tables of a run, the bars, and what could not be measured."""
    names = (RATE, IN_FLIGHT, FAILED, LEFT_OUT)
    rows = []
    for under in figures.loads(RATE):
        for game in figures.contestants(under):
            cells = [figures.median(name, game, under) for name in names]
            one, rate = figures.median(RATE, game, load(1)), cells[0]
            over = "" if one is None or rate is None else f"{rate / one:.1f}"
            rows.append((under, game, *("" if cell is None else f"{cell:,.4g}" for cell in cells), over))
    parts = [
        "### Episodes of one worker against one server\n\n"
        + table(("load", "environment", *names, "over one session"), rows)
    ]
    parts += verdicts(figures, bars(figures), "g")
    return "\n\n".join(parts)
