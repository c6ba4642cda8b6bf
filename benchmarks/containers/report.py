"""The figures as Markdown tables, and the bars that they are held against."""

from collections.abc import Iterator, Sequence

from benchmarks.wire.bars import Bar
from benchmarks.wire.figures import Figures
from benchmarks.wire.report import table, verdicts

COLD: Sequence[str] = ("cold s",)
POOL: Sequence[str] = (
    "hand-out p50 ms",
    "hand-out p95 ms",
    "while others start p50 ms",
    "while others start p95 ms",
)


def bars(figures: Figures) -> Iterator[Bar]:
    """Yield every bar that this run has the figures for."""
    for load in figures.loads(COLD[0]):
        ours, plain = (figures.median(COLD[0], who, load) for who in ("ours", "docker run"))
        if ours and plain:
            yield Bar(f"cold start to healthy, {load}: ours / docker run", ours / plain, 1.5, "at most")
    for load in figures.loads(POOL[0]):
        if (value := figures.median(POOL[0], "ours", load)) is not None:
            yield Bar(f"hand-out of a warm pool, {load}: p50, ms", value, 20, "at most")


def report(figures: Figures, held: Sequence[Bar]) -> str:
    """Return the tables, the bars, and what could not be measured."""
    parts = []
    for title, names in (("Cold start to healthy, medians", COLD), ("Hand-out of a warm pool", POOL)):
        rows = [
            (load, who, *(_number(figures.median(name, who, load)) for name in names))
            for load in figures.loads(names[0])
            for who in ("docker run", "ours")
            if figures.median(names[0], who, load) is not None
        ]
        if rows:
            parts.append(f"### {title}\n\n" + table(("image", "by", *names), rows))
    parts += verdicts(figures, held)
    return "\n\n".join(parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
