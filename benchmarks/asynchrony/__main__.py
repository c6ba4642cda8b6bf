"""The command `python -m benchmarks.asynchrony`."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import commandline
from benchmarks.asynchrony.measures import Plan, measure
from benchmarks.asynchrony.report import bars, report
from benchmarks.commandline import count, heading, progress, run_measurement, write
from rl_bridge.errors import BridgeError

_DESCRIPTION = """\
The gain of asynchronous training: one job with max_staleness 0, 1 and 4 and the same batch, sessions and workers.
Environments sleep for log-normal times (sigma 1) in two worker processes, a trainer computes in a third; admission,
ledger, buffer, dispatcher, workers and services are those of training. Prints medians of alternating rounds."""

_EXAMPLES = """\
examples:
  python -m benchmarks.asynchrony              about seven minutes
  python -m benchmarks.asynchrony --quick      does it run?
  python -m benchmarks.asynchrony --rounds 1 --json out.json"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status: 0, or 2 where a measurement failed."""
    parser = commandline.create_parser("asynchrony", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--rounds", type=count, metavar="N", help="3 by default")
    arguments = parser.parse_args(argv)
    plan = Plan().quick() if arguments.quick else Plan()
    if arguments.rounds is not None:
        plan = replace(plan, rounds=arguments.rounds)
    measurements, status = run_measurement(
        lambda measurements: measure(plan, measurements, progress), BridgeError
    )
    job = plan.job
    about = (
        f"{plan.rounds} rounds of {job.iterations} steps, {job.groups_per_batch} groups of {job.group_size} "
        f"a step, {job.sessions * job.workers} sessions"
    )
    print(heading(about))
    print(report(measurements))
    write(arguments.json, measurements, bars(measurements))
    return status


if __name__ == "__main__":
    sys.exit(main())
