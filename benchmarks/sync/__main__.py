"""The command `python -m benchmarks.sync`."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from benchmarks import commandline
from benchmarks.commandline import count, heading, progress, run_measurement, write
from benchmarks.sync.measures import BUSY, IDLE, WHOLE, synchronisations
from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.report import table, verdicts
from rl_bridge.errors import BridgeError

BOUND = 1.3

_DESCRIPTION = """\
The cost of a synchronisation of weights, from the trainer's tensors to a vLLM engine in another process that samples
from them; compared, in every round, with the engine's reload of the same weights from its own memory. Needs vLLM and
Monarch."""

_EXAMPLES = """\
examples:
  python -m benchmarks.sync                     100 million parameters, about two minutes
  python -m benchmarks.sync --quick             does it run?
  python -m benchmarks.sync --json out.json     every round's figures into a file"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status: 0, or 2 where a measurement failed."""
    arguments = _parser().parse_args(argv)
    parameters, rounds = (45_000_000, 2) if arguments.quick else (arguments.parameters, arguments.rounds)
    measurements, status = run_measurement(
        lambda measurements: asyncio.run(synchronisations(parameters, rounds, measurements, progress)),
        BridgeError,
    )
    all_bars = _bars(measurements)
    print(heading(f"{rounds} rounds"))
    print(_report(measurements, all_bars))
    write(arguments.json, measurements, all_bars)
    return status


def _bars(measurements: Measurements) -> list[Bar]:
    medians = ((state, measurements.median(WHOLE, state)) for state in (IDLE, BUSY))
    return [
        Bar(f"{WHOLE}, {state}", value, BOUND, "at most") for state, value in medians if value is not None
    ]


def _report(measurements: Measurements, all_bars: Sequence[Bar]) -> str:
    rows = [
        (name, subject, f"{measurements.median(name, subject):.4g}")
        for name, subject, _ in measurements.values
    ]
    parts = [table(("median of", "", ""), rows)] if rows else []
    parts += verdicts(measurements, all_bars)
    return "\n\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = commandline.create_parser("sync", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--parameters", type=count, default=100_000_000, metavar="N", help="model parameters (%(default)s)")
    add("--rounds", type=count, default=10, metavar="N", help="synchronisations of each kind (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
