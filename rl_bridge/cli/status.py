"""`ropewalk status`: the status of a live run."""

import argparse
import asyncio
import contextlib
import sys
import time
from pathlib import Path

from openenv_core.cli import Command
from rl_bridge.cli.common import FAILED, RUNS, number_type, with_exit_status
from rl_bridge.errors import StatusError
from rl_bridge.metrics.status import ADDRESS_FILE, StatusSnapshot, read_served_address, request_status

DEFAULT_WATCH_S = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_source(parser)
    text = "expected number of hosts, the controller's and those without GPUs included; with fewer alive the exit "
    text += "status is 1"
    least_one = number_type("--num_nodes", int, least=1)
    parser.add_argument("--num_nodes", "--num-nodes", type=least_one, metavar="N", help=text)
    text = "refresh every SECONDS, by default 2, until Ctrl-C or the end of the run"
    seconds = number_type("--watch", float)
    parser.add_argument(
        "--watch", type=seconds, nargs="?", const=DEFAULT_WATCH_S, metavar="SECONDS", help=text
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one line per refresh")


@with_exit_status("status")
def run(arguments: argparse.Namespace) -> int:
    """Print the status; returns 0, 1 if no run answers or hosts are missing, 2 for a bad command line."""
    from rich.console import Console
    from rich.live import Live

    from rl_bridge.cli.status_view import render_status

    address, console = find_live_address(arguments), Console()
    snapshot = request_snapshot(address)
    # Without a terminal that can move its cursor, Live would print the last refresh alone.
    is_live = console.is_terminal and not console.is_dumb_terminal and not arguments.json
    is_live = is_live and arguments.watch is not None
    with Live(console=console, auto_refresh=False) if is_live else contextlib.nullcontext() as live:
        while True:
            if arguments.json:
                print(snapshot.model_dump_json(), flush=True)
            elif live is not None:
                live.update(render_status(snapshot), refresh=True)
            else:
                console.print(render_status(snapshot))
            if arguments.watch is None:
                break
            time.sleep(arguments.watch)
            try:
                snapshot = request_snapshot(address)
            except StatusError:
                print(f"the run at {address} no longer answers", file=sys.stderr)
                break
    if (num_hosts := arguments.num_nodes) is None or len(snapshot.hosts) >= num_hosts:
        return 0
    alive = f"{len(snapshot.hosts)} are alive: {', '.join(sorted(snapshot.hosts))}"
    print(f"ropewalk status: expected {num_hosts} hosts, {alive}", file=sys.stderr)
    return FAILED


def add_source(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the options that select the run."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--addr", metavar="HOST:PORT", help="query the run that serves its status at this address"
    )
    text = f"the run in this folder; default: the newest live one in ./{RUNS}"
    source.add_argument("--run", metavar="FOLDER", help=text)
    return source


def find_live_address(arguments: argparse.Namespace) -> str:
    """Return the address where the selected run serves its status; StatusError if there is no such live run."""
    if arguments.addr is not None:
        return str(arguments.addr)
    if arguments.run is not None:
        if (address := _find_address(Path(arguments.run))) is not None:
            return address
        raise StatusError(
            f"expected a live run in {arguments.run!r}, found no {ADDRESS_FILE} there; it is over, or has not "
            "begun to serve"
        )
    runs = Path(RUNS)
    for file in sorted(runs.glob(f"*/{ADDRESS_FILE}"), key=lambda file: file.stat().st_mtime, reverse=True):
        with contextlib.suppress(StatusError):  # a killed run leaves its address file behind
            if (address := _find_address(file.parent)) is not None:
                return address
    raise StatusError(
        f"expected a live run in {str(runs.absolute())!r}, found none; "
        "name one by --addr HOST:PORT or --run FOLDER, or start one by ropewalk train"
    )


def _find_address(folder: Path) -> str | None:
    """Return the address where a folder's run serves its status; None if none is noted, StatusError if it is gone."""
    if (served := read_served_address(folder)) is None:
        return None
    address, began = served
    if (found := request_snapshot(address)).began != began:
        raise StatusError(
            f"expected the run in {str(folder)!r} at {address}, where {found.name!r} is now; it was killed, and goes "
            f"on by ropewalk train --resume {folder}"
        )
    return address


def request_snapshot(address: str) -> StatusSnapshot:
    """Request the status once; raises as `request_status` does."""
    return asyncio.run(request_status(address))


COMMAND = Command(
    name="status",
    help="show the status of a run: its mesh, replicas, versions, leases",
    configure=configure,
    run=run,
    examples=(
        "ropewalk status",
        "ropewalk status --addr 10.0.0.1:29501 --num_nodes 8",
        "ropewalk status --run runs/seven --watch",
        "ropewalk status --json",
    ),
)
