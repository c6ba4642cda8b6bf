"""How processes spend their wall time, as a table."""

from collections.abc import Mapping

from rich.table import Table

from rl_bridge.cli.plain import plain, printable
from rl_bridge.metrics.spans import SpanTotals
from rl_bridge.metrics.throughput import TARGETS, Throughput

ACCOUNTED_FOR = 0.02
"""The share of a process's wall time that may stay without a name."""


def spent_table(spans: Mapping[str, SpanTotals], *, title: str) -> Table:
    """A line for each process: its work, its waiting, what nobody accounts for, and its processor time.

    Args:
        spans: By process.
        title: Says which stretch of time this is.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("process", overflow="fold")
    table.add_column("work", justify="right")
    table.add_column("idle", justify="right")
    table.add_column("unaccounted", justify="right")
    table.add_column("CPU", justify="right")
    table.add_column("works on", overflow="fold")
    table.add_column("waits for", overflow="fold")
    for process, totals in spans.items():
        if totals.wall_s > 0.0:
            table.add_row(plain(process), *_cells(totals))
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
    return ", ".join(
        f"{plain(word)} {spent / wall_s:.1%}" for word, spent in largest if spent / wall_s >= 0.0005
    )


def throughput_lines(found: Throughput) -> str:
    """What was done, how busy each role was beside its target, and whether the time is accounted for."""
    rate = f", {found.groups / found.seconds:.2f} groups a second" if found.groups is not None else ""
    lines = [f"{found.steps} steps in {found.seconds:.1f} s{rate}"]
    for role, totals in found.roles.items():
        busy = found.utilisation(role)
        if busy is None or (totals.rest_s == 0.0 and role not in TARGETS):
            continue
        line = f"{printable(role)} had something to do {busy:.1%} of the time"
        met = found.met(role)
        if met is not None:
            line += f"; the target of {TARGETS[role]:.0%} is {'met' if met else 'missed'}"
        lines.append(line)
    within = "within" if found.unaccounted <= ACCOUNTED_FOR else "above"
    lines.append(
        f"unaccounted time at most {found.unaccounted:.1%}, {within} the {ACCOUNTED_FOR:.0%} allowed"
    )
    return "\n".join(lines)
