"""`ropewalk bench`: a run's throughput, and how its processes spend their time."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from openenv_core.cli import Command
from rl_bridge.cli.common import number_type, replace_unprintable, with_exit_status
from rl_bridge.errors import StatusError

if TYPE_CHECKING:
    from rl_bridge.metrics.throughput import Throughput

DEFAULT_SECONDS = 10.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    from rl_bridge.cli.status import add_source

    parser.add_argument(
        "what",
        choices=("throughput",),
        help="what to measure: utilisation of rollout and trainer against their targets, and idle time",
    )
    add_source(parser)
    parser.add_argument(
        "--seconds",
        type=number_type("--seconds", float),
        default=DEFAULT_SECONDS,
        metavar="S",
        help="seconds to watch a live run (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


@with_exit_status("bench")
def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 0, 1 if there is nothing to measure, 2 for a bad command line."""
    _print(_measure(arguments), as_json=arguments.json)
    return 0


def _measure(arguments: argparse.Namespace) -> "Throughput":
    from rl_bridge.cli.status import find_live_address, request_snapshot
    from rl_bridge.metrics.throughput import Throughput

    try:
        address = find_live_address(arguments)
        earlier = request_snapshot(address)
    except StatusError:
        if arguments.run is None:
            raise
        return Throughput.from_log(Path(arguments.run) / "metrics.jsonl")
    time.sleep(arguments.seconds)
    return Throughput.from_snapshots(earlier, request_snapshot(address))


def _print(throughput: "Throughput", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(throughput.as_json()))
        return
    from rich.console import Console

    from rl_bridge.cli.status_view import make_span_table

    console = Console()
    console.print(_summarize(throughput), highlight=False, soft_wrap=True)
    console.print(make_span_table(throughput.roles, title="wall time of each role"))


def _summarize(throughput: "Throughput") -> str:
    """Return the summary: throughput, each role's utilisation beside its target, and unaccounted time."""
    from rl_bridge.cli.status_view import MAX_UNACCOUNTED_SHARE
    from rl_bridge.metrics.throughput import TARGETS

    rate = (
        f", {throughput.groups / throughput.seconds:.2f} groups a second"
        if throughput.groups is not None
        else ""
    )
    lines = [f"{throughput.steps} steps in {throughput.seconds:.1f} s{rate}"]
    for role, totals in throughput.roles.items():
        busy = throughput.utilisation(role)
        if busy is None or (totals.rest_s == 0.0 and role not in TARGETS):
            continue
        line = f"{replace_unprintable(role)} had something to do {busy:.1%} of the time"
        is_met = throughput.meets_target(role)
        if is_met is not None:
            line += f"; the target of {TARGETS[role]:.0%} is {'met' if is_met else 'missed'}"
        lines.append(line)
    relation = "within" if throughput.unaccounted <= MAX_UNACCOUNTED_SHARE else "above"
    lines.append(
        f"unaccounted time at most {throughput.unaccounted:.1%}, {relation} the {MAX_UNACCOUNTED_SHARE:.0%} allowed"
    )
    return "\n".join(lines)


COMMAND = Command(
    name="bench",
    help="measure how well a run keeps rollout and trainer busy",
    configure=configure,
    run=run,
    examples=(
        "ropewalk bench throughput",
        "ropewalk bench throughput --addr 10.0.0.1:29501 --seconds 60",
        "ropewalk bench throughput --run runs/seven",
    ),
)
