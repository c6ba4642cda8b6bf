"""Reports as Markdown tables, and the bounds that results are checked against."""

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
    job_name,
)
from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.report import table, verdicts

GAIN = 1.6
"""Minimum of groups/s relative to the synchronous loop."""
ACCOUNTED_FOR = 0.02


def bound(measurements: Measurements) -> float | None:
    """Return (roll + train + sync) / max(roll, train) of the synchronous loop: the most that overlap can gain."""
    roll, train, sync = (measurements.median(metric, job_name(SYNCHRONOUS)) for metric in (ROLL, TRAIN, SYNC))
    if roll is None or train is None or sync is None:
        return None
    return (roll + train + sync) / max(roll, train)


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    base = measurements.median(GROUPS, job_name(SYNCHRONOUS))
    roll, train, sync = (measurements.median(phase, job_name(SYNCHRONOUS)) for phase in (ROLL, TRAIN, SYNC))
    if roll is not None and train is not None and sync is not None:
        for phase, spent in (("roll", roll), ("train", train)):
            share = spent / (roll + train + sync)
            yield Bar(f"{phase} over a synchronous step", share, 0.4, "at least")
            yield Bar(f"{phase} over a synchronous step", share, 0.6, "at most")
    for staleness in BOUNDS:
        name = job_name(staleness)
        rate, stalest = measurements.median(GROUPS, name), measurements.median(STALEST, name)
        if rate is not None and base is not None and staleness != SYNCHRONOUS:
            yield Bar(f"{name}: groups/s over synchronous", rate / base, GAIN, "at least")
        if stalest is not None:
            yield Bar(f"{name}: staleness", max(measurements.values[STALEST, name, ""]), staleness, "at most")
        for role in ROLES:
            unaccounted = measurements.median(UNACCOUNTED, name, role)
            if unaccounted is not None:
                yield Bar(f"{name}: unaccounted time of the {role}", unaccounted, ACCOUNTED_FOR, "at most")


def report(measurements: Measurements) -> str:
    """Return the tables of a run, the bars, and what could not be measured."""
    base = measurements.median(GROUPS, job_name(SYNCHRONOUS))
    rows = []
    for staleness in BOUNDS:
        rate = measurements.median(GROUPS, job_name(staleness))
        if rate is not None and base is not None:
            cells = [measurements.median(name, job_name(staleness)) for name in (ROLL, TRAIN, SYNC, STALEST)]
            busy = [measurements.median("busy", job_name(staleness), role) for role in ("rollout", "trainer")]
            rows.append(
                (
                    job_name(staleness),
                    f"{rate:.2f}",
                    f"{rate / base:.2f}",
                    *("" if cell is None else f"{cell:.3g}" for cell in cells),
                    *("" if share is None else f"{share:.1%}" for share in busy),
                )
            )
    heading = ("loop", GROUPS, "over synchronous", "waits for roll s", TRAIN, SYNC, STALEST)
    parts = ["### Groups a second\n\n" + table((*heading, "rollout busy", "trainer busy"), rows)]
    limit = bound(measurements)
    if limit is not None:
        parts.append(f"(roll + train + sync) / max(roll, train) of the synchronous loop: {limit:.2f}")
    parts += verdicts(measurements, bars(measurements), ".3g")
    return "\n\n".join(parts)
