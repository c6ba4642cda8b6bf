"""The report of a run that lost processes, and the bounds it is checked against."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.faults.kills import Killer
from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.report import table, verdicts

NOTICED_S = 10.0
START_FACTOR = 2.0
SINGLE_RANK = ("reward", "environment")
"""Services with one replica: work waits for its restart."""


def bars(
    killer: Killer, *, wanted: int, trained: Sequence[int], groups: int, left: int, status: int = 0
) -> Iterator[Bar]:
    """Yield every bar.

    Args:
        killer: The killer, after its kills.
        wanted: Number of kills requested.
        trained: The groups of the history that led to the final weights.
        groups: Number of groups that the run should train.
        left: Number of processes left after the run's end.
        status: Expected exit status of the run.
    """
    job, kills = killer.job, killer.kills
    yield Bar("exit status of the run", job.process.returncode, status, "at most")
    yield Bar("processes killed", len(kills), wanted, "at least")
    yield Bar("groups trained", len(trained), groups, "at least")
    yield Bar("groups trained twice", len(trained) - len(set(trained)), 0, "at most")
    yield Bar("processes left", left, 0, "at most")
    for kind in Counter(kill.kind for kill in kills):
        ours = [kill for kill in kills if kill.kind == kind]
        noticed = [float("inf") if kill.noticed_s is None else kill.noticed_s for kill in ours]
        yield Bar(f"{kind}: slowest loss noticed and given to others, s", max(noticed), NOTICED_S, "at most")
        serving = max(float("inf") if kill.serving_s is None else kill.serving_s for kill in ours)
        if kind == "policy" and killer.cold_start_s is not None:
            yield Bar(
                "policy: slowest to serve again, over the cold start",
                serving / killer.cold_start_s,
                START_FACTOR,
                "at most",
            )
        elif kind in SINGLE_RANK:
            yield Bar(f"{kind}: slowest to serve again, s", serving, NOTICED_S, "at most")


def report(killer: Killer, all_bars: Sequence[Bar], account: Mapping[str, float]) -> str:
    """Return the kills, what was lost with them and the bars as Markdown."""
    rows = [
        (kill.kind, str(kill.replica), str(kill.version), _seconds(kill.noticed_s), _seconds(kill.serving_s))
        for kill in killer.kills
    ]
    parts = [table(("killed", "replica", "at version", "noticed s", "serving again s"), rows)]
    if killer.cold_start_s is not None:
        parts.append(f"cold start of a generator in this run: {killer.cold_start_s:.1f} s")
    if account:
        lost = "; ".join(
            f"{name.partition('/')[2].replace('_', ' ')} {count:g}" for name, count in account.items()
        )
        parts.append(f"of groups leased and episodes played: {lost}")
    parts += verdicts(Measurements(), all_bars, ".3g")
    return "\n\n".join(parts)


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"
