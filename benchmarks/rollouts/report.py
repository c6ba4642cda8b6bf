"""Reports as Markdown tables, and the bounds that results are checked against."""

from collections.abc import Iterator

from benchmarks.rollouts.measures import FAILED, IN_FLIGHT, LEFT_OUT, RATE, load
from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.report import table, verdicts

MANY = 256


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for: enough episodes in flight, and no failures."""
    for game in measurements.subjects(load(MANY)):
        for metric, bound in ((FAILED, 0.0), (LEFT_OUT, 0.0)):
            worst = max(measurements.values[metric, game, load(MANY)])
            yield Bar(f"{game}, {load(MANY)}: {metric}", worst, bound, "at most")
        fewest = min(measurements.values[IN_FLIGHT, game, load(MANY)])
        yield Bar(f"{game}, {load(MANY)}: {IN_FLIGHT}", fewest, MANY, "at least")


def report(measurements: Measurements) -> str:
    """Return the tables of a run, the bars, and what could not be measured."""
    names = (RATE, IN_FLIGHT, FAILED, LEFT_OUT)
    rows = []
    for under in measurements.loads(RATE):
        for game in measurements.subjects(under):
            cells = [measurements.median(name, game, under) for name in names]
            single_rate, rate = measurements.median(RATE, game, load(1)), cells[0]
            over = "" if single_rate is None or rate is None else f"{rate / single_rate:.1f}"
            rows.append((under, game, *("" if cell is None else f"{cell:,.4g}" for cell in cells), over))
    parts = [
        "### Episodes of one worker against one server\n\n"
        + table(("load", "environment", *names, "over one session"), rows)
    ]
    parts += verdicts(measurements, bars(measurements), "g")
    return "\n\n".join(parts)
