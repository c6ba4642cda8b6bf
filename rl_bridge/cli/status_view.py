"""A snapshot of a run as tables."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rl_bridge.cli.common import printable, table
from rl_bridge.metrics.spans import SpanTotals
from rl_bridge.metrics.status import SERVING, StatusSnapshot
from rl_bridge.metrics.throughput import TARGETS, Throughput

MAX_LEASES = 8
"""Leases shown: those that are under way longest."""
MAX_EVENTS = 8


def view(snapshot: StatusSnapshot) -> RenderableType:
    """The tables of a snapshot, one below the other."""
    parts: list[RenderableType] = [Text(_head(snapshot)), _mesh(snapshot)]
    if snapshot.groups or snapshot.leases:
        parts.append(Text(printable(_groups(snapshot))))
    if snapshot.leases:
        oldest = sorted(snapshot.leases, key=lambda lease: -lease.age_s)[:MAX_LEASES]
        leases = ((one.group, one.worker, one.attempt, _duration(one.age_s)) for one in oldest)
        title = f"leases under way longest, of {len(snapshot.leases)}"
        parts.append(table(title, (">group", "worker", ">attempt", ">for"), leases))
    if snapshot.spans:
        parts.append(spent_table(snapshot.spans, title="wall time since the start of each process"))
    if snapshot.events:
        events = (
            (time.strftime("%H:%M:%S", time.localtime(one.at)), one.service, _or_dash(one.replica), one.what)
            for one in snapshot.events[-MAX_EVENTS:]
        )
        parts.append(table("events", ("at", "service", "replica", "what"), events))
    return Group(*parts)


def _head(snapshot: StatusSnapshot) -> str:
    behind = snapshot.version - snapshot.served
    served = "served by every generator" if not behind else f"generators serve version {snapshot.served}"
    return (
        f"{printable(snapshot.name)} on {printable(snapshot.host)} (pid {snapshot.pid}), "
        f"{_duration(snapshot.taken - snapshot.began)} under way, in {printable(snapshot.folder)}\n"
        f"version {snapshot.version} of {snapshot.iterations}, {served}; "
        f"staleness at most {snapshot.max_staleness}"
    )


def _mesh(snapshot: StatusSnapshot) -> Table:
    hosts = len(snapshot.hosts)
    replicas = [(service.name, one) for service in snapshot.services for one in service.replicas]
    mesh = table(
        f"mesh: {hosts} host{'s' if hosts > 1 else ''}",
        ("service", "replica", "state", "host", "pids", ">in flight", ">restarts", ">version"),
        (
            (
                *(name, one.id, one.state, one.host or "-", " ".join(map(str, one.pids)) or "-"),
                *(one.in_flight, one.restarts, _or_dash(one.version)),
            )
            for name, one in replicas
        ),
    )
    for row, (_, one) in zip(mesh.rows, replicas, strict=True):
        row.style = "" if one.state == SERVING else "yellow"
    return mesh


def _groups(snapshot: StatusSnapshot) -> str:
    counts = ", ".join(f"{number:,} {state}" for state, number in snapshot.groups.items())
    workers = Counter(lease.worker for lease in snapshot.leases)
    by_worker = "; leases: " + ", ".join(f"{worker} {n}" for worker, n in workers.items()) if workers else ""
    return f"groups: {counts}{by_worker}"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


ACCOUNTED_FOR = 0.02
"""The share of a process's wall time that may stay without a name."""
SHOWN_SHARE = 0.0005
"""What took less of it is not listed."""


def spent_table(spans: Mapping[str, SpanTotals], *, title: str) -> Table:
    """A line for each process: its work, its waiting, what nobody accounts for, and its processor time.

    Args:
        spans: By process.
        title: Says which stretch of time this is.
    """
    headings = ("process", ">work", ">idle", ">unaccounted", ">CPU", "works on", "waits for")
    spent = {process: totals for process, totals in spans.items() if totals.wall_s > 0.0}
    shown = table(title, headings, ((process, *_spent(totals)) for process, totals in spent.items()))
    for row, totals in zip(shown.rows, spent.values(), strict=True):
        row.style = "yellow" if totals.unaccounted_s > ACCOUNTED_FOR * totals.wall_s else ""
    return shown


def _spent(totals: SpanTotals) -> Iterator[str]:
    work, idle = totals.work, totals.idle
    for seconds in (sum(work.values()), sum(idle.values()), totals.unaccounted_s, totals.cpu_s):
        yield f"{seconds / totals.wall_s:.1%}"
    for words in (work, idle):
        largest = sorted(words.items(), key=lambda item: -item[1])
        shares = ((word, seconds / totals.wall_s) for word, seconds in largest)
        yield ", ".join(f"{word} {share:.1%}" for word, share in shares if share >= SHOWN_SHARE)


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
