"""Figures as Markdown tables, and what must show."""

from collections.abc import Iterator

from benchmarks.asynchrony.measures import (
    BOUNDS,
    GROUPS,
    ROLES,
    ROLL,
    STALEST,
    SYNC,
    SYNCHRONOUS,
    TRAIN,
    UNACCOUNTED,
    who,
)
from benchmarks.wire.bars import Bar
from benchmarks.wire.figures import Figures
from benchmarks.wire.report import table, verdicts

GAIN = 1.6
"""Groups a second over the synchronous loop's, at least."""
ACCOUNTED_FOR = 0.02


def bound(figures: Figures) -> float | None:
    """(roll + train + sync) / max(roll, train) of the synchronous loop: what hiding one behind the other can gain."""
    roll, train, sync = (figures.median(part, who(SYNCHRONOUS)) for part in (ROLL, TRAIN, SYNC))
    if roll is None or train is None or sync is None:
        return None
    return (roll + train + sync) / max(roll, train)


def bars(figures: Figures) -> Iterator[Bar]:
    """Yield every bar that this run has the figures for."""
    base = figures.median(GROUPS, who(SYNCHRONOUS))
    roll, train, sync = (figures.median(part, who(SYNCHRONOUS)) for part in (ROLL, TRAIN, SYNC))
    if roll is not None and train is not None and sync is not None:
        for part, spent in (("roll", roll), ("train", train)):
            share = spent / (roll + train + sync)
            yield Bar(f"{part} over a synchronous step", share, 0.4, "at least")
            yield Bar(f"{part} over a synchronous step", share, 0.6, "at most")
    for staleness in BOUNDS:
        name = who(staleness)
        rate, stalest = figures.median(GROUPS, name), figures.median(STALEST, name)
        if rate is not None and base is not None and staleness != SYNCHRONOUS:
            yield Bar(f"{name}: groups/s over synchronous", rate / base, GAIN, "at least")
        if stalest is not None:
            yield Bar(f"{name}: staleness", max(figures.values[STALEST, name, ""]), staleness, "at most")
        for role in ROLES:
            unaccounted = figures.median(UNACCOUNTED, name, role)
            if unaccounted is not None:
                yield Bar(f"{name}: unaccounted time of the {role}", unaccounted, ACCOUNTED_FOR, "at most")


def report(figures: Figures) -> str:
    """Return the tables of a run, the bars, and what could not be measured."""
    base = figures.median(GROUPS, who(SYNCHRONOUS))
    rows = []
    for staleness in BOUNDS:
        rate = figures.median(GROUPS, who(staleness))
        if rate is not None and base is not None:
            cells = [figures.median(name, who(staleness)) for name in (ROLL, TRAIN, SYNC, STALEST)]
            busy = [figures.median("busy", who(staleness), role) for role in ("rollout", "trainer")]
            rows.append(
                (
                    who(staleness),
                    f"{rate:.2f}",
                    f"{rate / base:.2f}",
                    *("" if cell is None else f"{cell:.3g}" for cell in cells),
                    *("" if share is None else f"{share:.1%}" for share in busy),
                )
            )
    heading = ("loop", GROUPS, "over synchronous", "waits for roll s", TRAIN, SYNC, STALEST)
    parts = ["### Groups a second\n\n" + table((*heading, "rollout busy", "trainer busy"), rows)]
    limit = bound(figures)
    if limit is not None:
        parts.append(f"(roll + train + sync) / max(roll, train) of the synchronous loop: {limit:.2f}")
    parts += verdicts(figures, bars(figures), ".3g")
    return "\n\n".join(parts)
