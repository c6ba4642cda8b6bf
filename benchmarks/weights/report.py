"""The figures as Markdown tables, and the bars that they are held against."""

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.weights.measures import MEMORY, STEADY
from benchmarks.wire.bars import Bar
from benchmarks.wire.figures import Figures
from benchmarks.wire.report import table, verdicts

TABLES: Sequence[tuple[str, Sequence[str]]] = (
    (
        "From the trainer's tensors to tensors in the generator's process",
        ("put ms", "to tensors ms", "to the engine's own memory ms", "memcpy ms"),
    ),
    (
        "The same over one thread's memcpy of as many bytes into touched memory",
        ("to tensors / memcpy", "to the engine's own memory / memcpy"),
    ),
    ("Peak memory of a trainer's rank while it publishes, beyond its weights", (MEMORY,)),
    ("A copy of the caller's own", ("get, into fresh memory ms",)),
)
BOUNDS: Final = {"shared_memory, 1 rank": 3.0, "shared_memory, 2 ranks": 5.0}
# A rank of two publishes its half. One that gathered the model would need as much again, and more.
MEMORY_BOUND: Final = 0.6


def bars(figures: Figures) -> Iterator[Bar]:
    """Yield every bar that this run has the figures for."""
    for who, bound in BOUNDS.items():
        ratio = figures.median("to tensors / memcpy", who, STEADY)
        if ratio is not None:
            yield Bar(f"to tensors / memcpy, {who}, {STEADY}", ratio, bound, "at most")
    for (figure, who, load), values in figures.values.items():
        if figure == MEMORY and "2 ranks" in who:
            yield Bar(f"{MEMORY}, {who}, {load}: most of all rounds", max(values), MEMORY_BOUND, "at most")


def report(figures: Figures, held: Sequence[Bar]) -> str:
    """Return the tables, the bars, and what could not be measured."""
    parts = []
    for title, names in TABLES:
        keys = dict.fromkeys((who, load) for name, who, load in figures.values if name in names)
        rows = [
            (who, load, *(_number(figures.median(name, who, load)) for name in names)) for who, load in keys
        ]
        if rows:
            parts.append(f"### {title}\n\n" + table(("by", "", *names), rows))
    parts += verdicts(figures, held)
    return "\n\n".join(parts)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"
