"""Which run a command asks, and what it answers."""

import argparse
import asyncio
from pathlib import Path

from rl_bridge.errors import StatusError
from rl_bridge.metrics.status import StatusSnapshot
from rl_bridge.metrics.status_server import ADDRESS_FILE, ask_status, served_address

RUNS = "runs"
"""Where runs are looked for; the default of `output_dir`."""


def add_source(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the options that say which run."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--addr", metavar="HOST:PORT", help="ask the run that serves its status there")
    source.add_argument(
        "--run", metavar="FOLDER", help=f"the run in this folder; by default the newest live one in ./{RUNS}"
    )
    return source


def live_address(arguments: argparse.Namespace) -> str:
    """Where the run that is meant serves its status.

    Raises:
        StatusError: The folder's run is over, or there is no live run.
    """
    if arguments.addr is not None:
        return str(arguments.addr)
    if arguments.run is not None:
        address = served_address(Path(arguments.run))
        if address is None:
            raise StatusError(
                f"expected a live run in {arguments.run!r}, found no {ADDRESS_FILE} there; it is over, or has not "
                "begun to serve"
            )
        return address
    return _newest_live(Path(RUNS))


def _newest_live(runs: Path) -> str:
    files = sorted(runs.glob(f"*/{ADDRESS_FILE}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        address = served_address(file.parent)
        if address is not None and answers(address):
            return address
    raise StatusError(
        f"expected a live run in {str(runs.absolute())!r}, found none; "
        "name one by --addr HOST:PORT or --run FOLDER, or start one by ropewalk train"
    )


def answers(address: str) -> bool:
    """Whether a run answers there; one that was killed leaves its address behind."""
    try:
        ask(address)
    except StatusError:
        return False
    return True


def ask(address: str) -> StatusSnapshot:
    """Ask once.

    Raises:
        ConfigError: The address is none.
        StatusError: Nobody answers there, or not as a run does.
    """
    return asyncio.run(ask_status(address))
