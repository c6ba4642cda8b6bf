"""The command `python -m benchmarks.routing`."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import commandline
from benchmarks.commandline import count, heading, progress, run_measurement, write
from benchmarks.routing.measures import Plan, measure
from benchmarks.routing.report import bars, report
from rl_bridge.errors import BridgeError

_DESCRIPTION = """\
The gain of least-loaded routing: the same heavy-tailed jobs over the replicas of a service, least loaded and round
robin, with all replicas alike and with one slowed three times. And the cost of a routed call, compared with a bare
call of Monarch. Prints medians over seeds."""

_EXAMPLES = """\
examples:
  python -m benchmarks.routing                 about four minutes
  python -m benchmarks.routing --quick         does it run?
  python -m benchmarks.routing --seeds 3 --json out.json"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status: 0, or 2 where a measurement failed."""
    parser = commandline.create_parser("routing", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--seeds", type=count, metavar="N", help="10 by default")
    arguments = parser.parse_args(argv)
    plan = Plan().quick() if arguments.quick else Plan()
    if arguments.seeds is not None:
        plan = replace(plan, seeds=arguments.seeds)
    measurements, status = run_measurement(
        lambda measurements: measure(plan, measurements, progress), BridgeError
    )
    about = f"{plan.seeds} seeds of {plan.jobs} jobs, {plan.callers} callers, {plan.replicas} replicas"
    print(heading(about))
    print(report(measurements))
    write(arguments.json, measurements, bars(measurements))
    return status


if __name__ == "__main__":
    sys.exit(main())
