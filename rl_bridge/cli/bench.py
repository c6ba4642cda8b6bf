"""`ropewalk bench`: how much a run gets done, and what its processes do meanwhile."""

import argparse
import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from openenv_core.cli import Command
from rl_bridge.cli.common import exit_status
from rl_bridge.errors import ConfigError

if TYPE_CHECKING:
    from rl_bridge.metrics.throughput import Throughput

DEFAULT_SECONDS = 10.0
MIN_ITERATIONS = 3
"""Of a synthetic job: with fewer it has not got going."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    from rl_bridge.cli.status import add_source

    parser.add_argument(
        "what",
        choices=("throughput",),
        help="utilisation of rollout and trainer beside their targets, idle time",
    )
    source = add_source(parser)
    source.add_argument(
        "--synthetic",
        action="store_true",
        help="a job of its own: environments that sleep for log-normal times, a trainer that computes for a second",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=DEFAULT_SECONDS,
        metavar="S",
        help="how long a live run is watched, and about how long a synthetic one lasts (%(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 0, 1 where there is nothing to measure, 2 if it was asked for wrongly."""
    return exit_status("bench", lambda: _bench(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.seconds < float("inf"):
        raise ConfigError(f"expected --seconds above 0, got {arguments.seconds:g}")
    _print(_measure(arguments), as_json=arguments.json)
    return 0


def _measure(arguments: argparse.Namespace) -> "Throughput":
    from rl_bridge.cli.status import answers, ask, live_address
    from rl_bridge.metrics.status import served_address
    from rl_bridge.metrics.throughput import Throughput

    if arguments.synthetic:
        return _synthetic(arguments.seconds)
    if arguments.run is not None:
        folder = Path(arguments.run)
        address = served_address(folder)
        if address is None or not answers(address):
            return Throughput.from_log(folder / "metrics.jsonl")
    address = live_address(arguments)
    earlier = ask(address)
    time.sleep(arguments.seconds)
    return Throughput.between(earlier, ask(address))


def _synthetic(seconds: float) -> "Throughput":
    from rl_bridge.synthetic.actor import run_synthetic
    from rl_bridge.synthetic.job import SyntheticSettings

    settings = SyntheticSettings()
    iterations = max(MIN_ITERATIONS, round(seconds / settings.train_s))
    return asyncio.run(run_synthetic(replace(settings, iterations=iterations))).throughput


def _print(found: "Throughput", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.as_json()))
        return
    from rich.console import Console

    from rl_bridge.cli.status_view import spent_table, throughput_lines

    console = Console()
    console.print(throughput_lines(found), highlight=False, soft_wrap=True)
    console.print(spent_table(found.roles, title="wall time of each role"))


COMMAND = Command(
    name="bench",
    help="measure how well a run, or a synthetic one, keeps rollout and trainer busy",
    configure=configure,
    run=run,
    examples=(
        "ropewalk bench throughput",
        "ropewalk bench throughput --addr 10.0.0.1:29501 --seconds 60",
        "ropewalk bench throughput --run runs/seven",
        "ropewalk bench throughput --synthetic",
    ),
)
