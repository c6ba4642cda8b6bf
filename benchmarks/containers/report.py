"""Reports as Markdown tables, and the bounds that results are checked against."""

from collections.abc import Iterator, Sequence

from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.report import table, verdicts

COLD: Sequence[str] = ("cold s",)
POOL: Sequence[str] = (
    "hand-out p50 ms",
    "hand-out p95 ms",
    "while others start p50 ms",
    "while others start p95 ms",
)


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for load in measurements.loads(COLD[0]):
        ours, plain = (measurements.median(COLD[0], runner, load) for runner in ("ours", "docker run"))
        if ours and plain:
            yield Bar(f"cold start to healthy, {load}: ours / docker run", ours / plain, 1.5, "at most")
    for load in measurements.loads(POOL[0]):
        if (value := measurements.median(POOL[0], "ours", load)) is not None:
            yield Bar(f"hand-out of a warm pool, {load}: p50, ms", value, 20, "at most")


def report(measurements: Measurements, all_bars: Sequence[Bar]) -> str:
    """Return the tables, the bars, and what could not be measured."""
    parts = []
    for title, names in (("Cold start to healthy, medians", COLD), ("Hand-out of a warm pool", POOL)):
        rows = [
            (load, runner, *(_number(measurements.median(name, runner, load)) for name in names))
            for load in measurements.loads(names[0])
            for runner in ("docker run", "ours")
            if measurements.median(names[0], runner, load) is not None
        ]
        if rows:
            parts.append(f"### {title}\n\n" + table(("image", "by", *names), rows))
    parts += verdicts(measurements, all_bars)
    return "\n\n".join(parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
