"""A snapshot of a run as tables."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rl_bridge.cli.reporting import plain, printable
from rl_bridge.metrics.spans import SpanTotals
from rl_bridge.metrics.status import SERVING, EventRow, ReplicaRow, StatusSnapshot
from rl_bridge.metrics.throughput import TARGETS, Throughput

MAX_LEASES = 8
"""Leases shown: those that are under way longest."""
MAX_EVENTS = 8


def view(snapshot: StatusSnapshot) -> RenderableType:
    """The tables of a snapshot, one below the other."""
    parts: list[RenderableType] = [_head(snapshot), _mesh(snapshot)]
    if snapshot.groups or snapshot.leases:
        parts.append(_groups(snapshot))
    if snapshot.leases:
        parts.append(_leases(snapshot))
    if snapshot.spans:
        parts.append(spent_table(snapshot.spans, title="wall time since the start of each process"))
    if snapshot.events:
        parts.append(_events(snapshot.events))
    return Group(*parts)


def _head(snapshot: StatusSnapshot) -> Text:
    behind = snapshot.version - snapshot.served
    served = "served by every generator" if not behind else f"generators serve version {snapshot.served}"
    return Text(
        f"{printable(snapshot.name)} on {printable(snapshot.host)} (pid {snapshot.pid}), "
        f"{_duration(snapshot.taken - snapshot.began)} under way, in {printable(snapshot.folder)}\n"
        f"version {snapshot.version} of {snapshot.iterations}, {served}; "
        f"staleness at most {snapshot.max_staleness}"
    )


def _mesh(snapshot: StatusSnapshot) -> Table:
    hosts = len(snapshot.hosts)
    table = Table(title=f"mesh: {hosts} host{'s' if hosts > 1 else ''}", title_justify="left")
    for heading in ("service", "replica", "state", "host", "pids"):
        table.add_column(heading, overflow="fold")
    for heading in ("in flight", "restarts", "version"):
        table.add_column(heading, justify="right")
    for service in snapshot.services:
        for replica in service.replicas:
            style = "" if replica.state == SERVING else "yellow"
            table.add_row(*map(plain, (service.name, *_cells(replica))), style=style)
    return table


def _cells(replica: ReplicaRow) -> Iterator[str]:
    yield str(replica.id)
    yield replica.state
    yield replica.host or "-"
    yield " ".join(map(str, replica.pids)) or "-"
    yield str(replica.in_flight)
    yield str(replica.restarts)
    yield "-" if replica.version is None else str(replica.version)


def _groups(snapshot: StatusSnapshot) -> Text:
    counts = ", ".join(f"{number:,} {state}" for state, number in snapshot.groups.items())
    workers = Counter(lease.worker for lease in snapshot.leases)
    by_worker = "; leases: " + ", ".join(f"{worker} {n}" for worker, n in workers.items()) if workers else ""
    return Text(printable(f"groups: {counts}{by_worker}"))


def _leases(snapshot: StatusSnapshot) -> Table:
    oldest = sorted(snapshot.leases, key=lambda lease: -lease.age_s)[:MAX_LEASES]
    table = Table(title=f"leases under way longest, of {len(snapshot.leases)}", title_justify="left")
    table.add_column("group", justify="right")
    table.add_column("worker")
    table.add_column("attempt", justify="right")
    table.add_column("for", justify="right")
    for lease in oldest:
        table.add_row(str(lease.group), plain(lease.worker), str(lease.attempt), _duration(lease.age_s))
    return table


def _events(events: tuple[EventRow, ...]) -> Table:
    table = Table(title="events", title_justify="left")
    for heading in ("at", "service", "replica", "what"):
        table.add_column(heading)
    for event in events[-MAX_EVENTS:]:
        at = time.strftime("%H:%M:%S", time.localtime(event.at))
        replica = "-" if event.replica is None else str(event.replica)
        table.add_row(at, plain(event.service), replica, plain(event.what))
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
            table.add_row(plain(process), *_spent_cells(totals))
    return table


def _spent_cells(totals: SpanTotals) -> tuple[str, ...]:
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
