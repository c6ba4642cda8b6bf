"""The command `python -m benchmarks.presets`."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import commandline
from benchmarks.commandline import FAILED, choices, count, heading, progress, run_measurement, write
from benchmarks.parts import Parts, add_options, open_folder, resume_hint
from benchmarks.presets.measures import measure
from benchmarks.presets.plan import CONFIG, Plan
from benchmarks.presets.report import bars, report
from rl_bridge.config import PRESETS
from rl_bridge.errors import BridgeError

_DESCRIPTION = """\
Trains the BlackJack example with each preset of `algorithm`, with the example's learning rate, entropy bonus and batch:
the exact return of the greedy policy after at most ten minutes; and whether ratios move and clipping takes effect."""

_EXAMPLES = """\
examples:
  python -m benchmarks.presets                   about an hour on two cores
  python -m benchmarks.presets --resume FOLDER   the remaining parts
  python -m benchmarks.presets --quick           does it run?
  python -m benchmarks.presets --presets dapo,ppo --seeds 3 --json out.json"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status: 0, or 2 where a measurement failed."""
    parser = commandline.create_parser("presets", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--presets", type=choices(tuple(PRESETS)), help="some of them; by default all")
    parser.add_argument("--seeds", type=count, metavar="N", help="1 by default")
    add_options(parser)
    arguments = parser.parse_args(argv)
    plan = Plan().quick() if arguments.quick else Plan()
    if arguments.presets is not None:
        plan = replace(plan, presets=arguments.presets)
    if arguments.seeds is not None:
        plan = replace(plan, seeds=tuple(range(arguments.seeds)))
    options = ("quick", "presets", "seeds")
    with open_folder(parser, arguments, plan.as_json(), name="presets", options=options, files=[CONFIG]) as (
        folder,
        plan_json,
    ):
        plan = Plan.from_json(plan_json)
        measurements, status = run_measurement(
            lambda measurements: measure(plan, Parts(folder, plan.parts(), measurements, progress)),
            BridgeError,
            interrupted=resume_hint("presets", folder),
        )
    print(heading(f"runs of {plan.seconds / 60:.3g} minutes at most"))
    print(report(measurements))
    write(arguments.json, measurements, bars(measurements))
    return status or (FAILED if measurements.notes else 0)


if __name__ == "__main__":
    sys.exit(main())
