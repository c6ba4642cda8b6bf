"""Renders a run's status snapshot as tables."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rl_bridge.cli.common import make_table, replace_unprintable
from rl_bridge.metrics.spans import SpanTotals
from rl_bridge.metrics.status import SERVING, StatusSnapshot

MAX_ROWS = 8
"""The most rows shown: of leases the oldest, of events the last."""
MAX_UNACCOUNTED_SHARE = 0.02
"""The share of a process's wall time that may be unaccounted for."""
SHOWN_SHARE = 0.0005
"""Phases with a smaller share of the wall time are not listed."""


def render_status(snapshot: StatusSnapshot) -> RenderableType:
    """Return the tables of a snapshot, stacked."""
    behind = snapshot.version > snapshot.served
    served = f"generators serve version {snapshot.served}" if behind else "served by every generator"
    head = (
        f"{replace_unprintable(snapshot.name)} on {replace_unprintable(snapshot.host)} (pid {snapshot.pid}), "
        f"{_format_duration(snapshot.taken - snapshot.began)} under way, in {replace_unprintable(snapshot.folder)}\n"
        f"version {snapshot.version} of {snapshot.iterations}, {served}; "
        f"staleness at most {snapshot.max_staleness}"
    )
    parts: list[RenderableType] = [Text(head), _make_mesh_table(snapshot)]
    if snapshot.groups or snapshot.leases:
        groups = f"groups: {', '.join(f'{number:,} {state}' for state, number in snapshot.groups.items())}"
        if workers := Counter(lease.worker for lease in snapshot.leases):
            groups += f"; leases: {', '.join(f'{worker} {count}' for worker, count in workers.items())}"
        parts.append(Text(replace_unprintable(groups)))
    if snapshot.leases:
        oldest = sorted(snapshot.leases, key=lambda lease: -lease.age_s)[:MAX_ROWS]
        leases = ((row.group, row.worker, row.attempt, _format_duration(row.age_s)) for row in oldest)
        title = f"leases under way longest, of {len(snapshot.leases)}"
        parts.append(make_table(title, (">group", "worker", ">attempt", ">for"), leases))
    if snapshot.spans:
        parts.append(make_span_table(snapshot.spans, title="wall time since the start of each process"))
    if snapshot.events:
        events = (
            (
                time.strftime("%H:%M:%S", time.localtime(row.at)),
                row.service,
                _format_optional(row.replica),
                row.what,
            )
            for row in snapshot.events[-MAX_ROWS:]
        )
        parts.append(make_table("events", ("at", "service", "replica", "what"), events))
    return Group(*parts)


def _make_mesh_table(snapshot: StatusSnapshot) -> Table:
    replicas = [(service.name, replica) for service in snapshot.services for replica in service.replicas]
    mesh = make_table(
        f"mesh: {len(snapshot.hosts)} host{'s' if len(snapshot.hosts) > 1 else ''}",
        ("service", "replica", "state", "host", "pids", ">in flight", ">restarts", ">version"),
        (
            (
                *(
                    name,
                    replica.id,
                    replica.state,
                    replica.host or "-",
                    " ".join(map(str, replica.pids)) or "-",
                ),
                *(replica.in_flight, replica.restarts, _format_optional(replica.version)),
            )
            for name, replica in replicas
        ),
    )
    for row, (_, replica) in zip(mesh.rows, replicas, strict=True):
        row.style = "" if replica.state == SERVING else "yellow"
    return mesh


def make_span_table(spans: Mapping[str, SpanTotals], *, title: str) -> Table:
    """Return a table with a row per process: work, idle, unaccounted and CPU time."""
    headings = ("process", ">work", ">idle", ">unaccounted", ">CPU", "works on", "waits for")
    totals_by_process = {process: totals for process, totals in spans.items() if totals.wall_s > 0.0}
    spans_table = make_table(
        title, headings, ((process, *_format_spans(totals)) for process, totals in totals_by_process.items())
    )
    for row, totals in zip(spans_table.rows, totals_by_process.values(), strict=True):
        row.style = "yellow" if totals.unaccounted_s > MAX_UNACCOUNTED_SHARE * totals.wall_s else ""
    return spans_table


def _format_spans(totals: SpanTotals) -> Iterator[str]:
    work, idle = totals.work, totals.idle
    for seconds in (sum(work.values()), sum(idle.values()), totals.unaccounted_s, totals.cpu_s):
        yield f"{seconds / totals.wall_s:.1%}"
    for phases in (work, idle):
        largest = sorted(phases.items(), key=lambda item: -item[1])
        shares = ((word, seconds / totals.wall_s) for word, seconds in largest)
        yield ", ".join(f"{word} {share:.1%}" for word, share in shares if share >= SHOWN_SHARE)


def _format_optional(value: object) -> str:
    return "-" if value is None else str(value)


def _format_duration(seconds: float) -> str:
    """Format a duration as 1:02:05, or 2:05 below an hour."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")
