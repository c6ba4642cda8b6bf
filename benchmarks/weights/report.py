"""Reports as Markdown tables, and the bounds that results are checked against."""

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.weights.measures import MEMORY, STEADY
from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements
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
# Each of two ranks publishes half. Gathering the model would take at least the model's size.
MEMORY_BOUND: Final = 0.6


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for subject, bound in BOUNDS.items():
        ratio = measurements.median("to tensors / memcpy", subject, STEADY)
        if ratio is not None:
            yield Bar(f"to tensors / memcpy, {subject}, {STEADY}", ratio, bound, "at most")
    for (metric, subject, load), values in measurements.values.items():
        if metric == MEMORY and "2 ranks" in subject:
            yield Bar(
                f"{MEMORY}, {subject}, {load}: most of all rounds", max(values), MEMORY_BOUND, "at most"
            )


def report(measurements: Measurements, all_bars: Sequence[Bar]) -> str:
    """Return the tables, the bars, and what could not be measured."""
    parts = []
    for title, names in TABLES:
        keys = dict.fromkeys((subject, load) for name, subject, load in measurements.values if name in names)
        rows = [
            (subject, load, *(_number(measurements.median(name, subject, load)) for name in names))
            for subject, load in keys
        ]
        if rows:
            parts.append(f"### {title}\n\n" + table(("by", "", *names), rows))
    parts += verdicts(measurements, all_bars)
    return "\n\n".join(parts)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"
