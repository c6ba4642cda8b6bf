"""The command `python -m benchmarks.weights`."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from benchmarks import commandline
from benchmarks.commandline import choices, count, heading, progress, run_measurement, write
from benchmarks.weights.measures import BenchError, transfers
from benchmarks.weights.report import bars, report
from benchmarks.wire.measurements import Measurements
from rl_bridge.errors import BridgeError

TRANSPORTS = ("shared_memory", "rdma")

_DESCRIPTION = """\
The cost of moving a policy's weights from a trainer of one and of two ranks (FSDP2) to a generator in another process;
compared with one thread's memcpy of as many bytes into touched memory, measured after each transfer. Prints medians
and the bars. Needs Monarch."""

_EXAMPLES = """\
examples:
  python -m benchmarks.weights                                   100 million parameters, about two minutes
  python -m benchmarks.weights --quick                           does it run?
  python -m benchmarks.weights --ranks 2 --rounds 50             the sharded trainer only
  python -m benchmarks.weights --json out.json                   every round's figures into a file"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status: 0, or 2 where a measurement failed."""
    arguments = _parser().parse_args(argv)
    parameters, rounds = (22_000_000, 2) if arguments.quick else (arguments.parameters, arguments.rounds)

    def measure(measurements: Measurements) -> None:
        for transport in arguments.transport:
            for ranks in map(int, arguments.ranks):
                asyncio.run(transfers(transport, ranks, parameters, rounds, measurements, progress))

    measurements, status = run_measurement(measure, BenchError, BridgeError)
    all_bars = list(bars(measurements))
    print(heading(f"{parameters / 1e6:g} million parameters in float32, {rounds} rounds"))
    print(report(measurements, all_bars))
    write(arguments.json, measurements, all_bars)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = commandline.create_parser("weights", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--transport", type=choices(TRANSPORTS), default=TRANSPORTS, metavar="NAMES", help="%(default)s")
    add(
        "--ranks",
        type=choices(("1", "2")),
        default=("1", "2"),
        metavar="N",
        help="ranks of the trainer (%(default)s)",
    )
    add("--parameters", type=count, default=100_000_000, metavar="N", help="model parameters (%(default)s)")
    add("--rounds", type=count, default=20, metavar="N", help="transfers beyond the first (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
