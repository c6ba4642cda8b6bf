"""The command `python -m benchmarks.rollouts`."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import commandline
from benchmarks.commandline import count, heading, progress, run_measurement, write
from benchmarks.rollouts.measures import Plan, measure
from benchmarks.rollouts.report import bars, report
from openenv_core.errors import ProviderError
from rl_bridge.errors import BridgeError

_DESCRIPTION = """\
Episodes/s of a rollout worker with 1 to 256 sessions against one environment server, with a policy that answers at
once: for an environment that waits, where throughput should grow with the sessions, and for BlackJack, where the CPU
time of the two processes is the limit. Prints medians of alternating rounds."""

_EXAMPLES = """\
examples:
  python -m benchmarks.rollouts              about four minutes
  python -m benchmarks.rollouts --quick      does it run?
  python -m benchmarks.rollouts --rounds 1 --json out.json"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status: 0, or 2 where a measurement failed."""
    parser = commandline.create_parser("rollouts", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--rounds", type=count, metavar="N", help="3 by default")
    arguments = parser.parse_args(argv)
    plan = Plan().quick() if arguments.quick else Plan()
    if arguments.rounds is not None:
        plan = replace(plan, rounds=arguments.rounds)
    measurements, status = run_measurement(
        lambda measurements: measure(plan, measurements, progress), BridgeError, ProviderError
    )
    print(heading(f"{plan.rounds} rounds"))
    print(report(measurements))
    write(arguments.json, measurements, bars(measurements))
    return status


if __name__ == "__main__":
    sys.exit(main())
