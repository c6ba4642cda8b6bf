"""The command `python -m benchmarks.weights`."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from benchmarks import commandline
from benchmarks.commandline import count, heading, measured, progress, some, write
from benchmarks.weights.measures import BenchError, transfers
from benchmarks.weights.report import bars, report
from benchmarks.wire.figures import Figures
from rl_bridge.errors import BridgeError

TRANSPORTS = ("shared_memory", "rdma")

_DESCRIPTION = """\
What it costs to move a policy's weights from its trainer, of one rank and of two (FSDP2), to a generator in another
process; beside it, one thread's memcpy of as many bytes into touched memory, measured after each transfer. Prints
medians and the bars. Needs Monarch."""

_EXAMPLES = """\
examples:
  python -m benchmarks.weights                                   100 million parameters, about two minutes
  python -m benchmarks.weights --quick                           does it run?
  python -m benchmarks.weights --ranks 2 --rounds 50             the sharded trainer alone
  python -m benchmarks.weights --json out.json                   every round's figures into a file"""


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print what there is, and return the exit status: 0, or 2 where something did not work."""
    arguments = _parser().parse_args(words)
    parameters, rounds = (22_000_000, 2) if arguments.quick else (arguments.parameters, arguments.rounds)

    def measure(figures: Figures) -> None:
        for transport in arguments.transport:
            for ranks in map(int, arguments.ranks):
                asyncio.run(transfers(transport, ranks, parameters, rounds, figures, progress))

    figures, status = measured(measure, BenchError, BridgeError)
    held = list(bars(figures))
    print(heading(f"{parameters / 1e6:g} million parameters in float32, {rounds} rounds"))
    print(report(figures, held))
    write(arguments.json, figures, held)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = commandline.parser("weights", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--transport", type=some(TRANSPORTS), default=TRANSPORTS, metavar="NAMES", help="%(default)s")
    add(
        "--ranks", type=some(("1", "2")), default=("1", "2"), metavar="N", help="of the trainer (%(default)s)"
    )
    add("--parameters", type=count, default=100_000_000, metavar="N", help="of the model (%(default)s)")
    add("--rounds", type=count, default=20, metavar="N", help="transfers beyond the first (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
