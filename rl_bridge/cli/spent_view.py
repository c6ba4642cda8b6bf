"""How processes spend their wall time, as a table."""

from collections.abc import Mapping

from rich.table import Table

from rl_bridge.metrics.totals import SpanTotals

ACCOUNTED_FOR = 0.02
"""The share of a process's wall time that may stay without a name."""


def spent_table(spans: Mapping[str, SpanTotals], *, title: str) -> Table:
    """A line for each process: its work, its waiting, what nobody accounts for, and its processor time.

    Args:
        spans: By process.
        title: Says which stretch of time this is.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("process")
    table.add_column("work", justify="right")
    table.add_column("idle", justify="right")
    table.add_column("unaccounted", justify="right")
    table.add_column("CPU", justify="right")
    table.add_column("works on", overflow="fold")
    table.add_column("waits for", overflow="fold")
    for process, totals in spans.items():
        if totals.wall_s > 0.0:
            table.add_row(process, *_cells(totals))
    return table


def _cells(totals: SpanTotals) -> tuple[str, ...]:
    wall_s = totals.wall_s
    unaccounted = totals.unaccounted_s / wall_s
    loud = "[yellow]" if unaccounted > ACCOUNTED_FOR else ""
    return (
        f"{sum(totals.work.values()) / wall_s:.1%}",
        f"{sum(totals.idle.values()) / wall_s:.1%}",
        f"{loud}{unaccounted:.1%}",
        f"{totals.cpu_s / wall_s:.1%}",
        _shares(totals.work, wall_s),
        _shares(totals.idle, wall_s),
    )


def _shares(seconds: Mapping[str, float], wall_s: float) -> str:
    largest = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{word} {spent / wall_s:.1%}" for word, spent in largest if spent / wall_s >= 0.0005)
