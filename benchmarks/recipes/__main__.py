"""The command `python -m benchmarks.recipes`."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import commandline
from benchmarks.commandline import FAILED, choices, count, heading, progress, run_measurement, write
from benchmarks.parts import Parts, add_options, open_folder, resume_hint
from benchmarks.recipes.measures import measure
from benchmarks.recipes.pictures import draw
from benchmarks.recipes.plan import RECIPES, SAMPLED_TASKS, Plan
from benchmarks.recipes.report import bars, report
from rl_bridge.errors import BridgeError

_DESCRIPTION = """\
Compares GRPO with longer fine-tuning for the same time, starting from a tiny policy that was fine-tuned on a few traces
until its validation loss stopped falling: the share of held-out tasks solved greedily, for examples/grpo_tools and
grpo_code. With --sampling instead: the share of GRPO's groups without gradient with env.sampling signal and uniform."""

_EXAMPLES = """\
examples:
  python -m benchmarks.recipes                   about four hours on two cores
  python -m benchmarks.recipes --resume FOLDER   the remaining parts
  python -m benchmarks.recipes --quick           does it run?
  python -m benchmarks.recipes --sampling        about two hours on two cores
  python -m benchmarks.recipes --recipes tools --seeds 1 --minutes 15 --json out.json"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status: 0, or 2 where a measurement failed."""
    parser = commandline.create_parser("recipes", _DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "--recipes", type=choices(RECIPES), help=f"some of {', '.join(RECIPES)}; by default all"
    )
    parser.add_argument("--seeds", type=count, metavar="N", help="3 by default")
    parser.add_argument("--minutes", type=count, metavar="N", help="duration of each run; 15 by default")
    parser.add_argument("--sampling", action="store_true", help="compare values of env.sampling instead")
    add_options(parser)
    arguments = parser.parse_args(argv)
    plan = Plan(sampling=arguments.sampling)
    if arguments.sampling:
        plan = replace(plan, tasks=SAMPLED_TASKS)
    if arguments.quick:
        plan = plan.quick()
    if arguments.recipes is not None:
        plan = replace(plan, recipes=arguments.recipes)
    if arguments.seeds is not None:
        plan = replace(plan, seeds=tuple(range(arguments.seeds)))
    if arguments.minutes is not None:
        plan = replace(plan, seconds=60.0 * arguments.minutes)
    options = ("quick", "recipes", "seeds", "minutes", "sampling")
    with open_folder(
        parser, arguments, plan.as_json(), name="recipes", options=options, files=plan.files()
    ) as (
        folder,
        plan_json,
    ):
        plan = Plan.from_json(plan_json)
        measurements, status = run_measurement(
            lambda measurements: measure(plan, Parts(folder, plan.parts(), measurements, progress)),
            BridgeError,
            interrupted=resume_hint("recipes", folder),
        )
        for picture in draw(plan, folder):
            progress(f"{picture}: drawn")
    length = f"{plan.groups} groups" if plan.sampling else f"{plan.seconds / 60:g} minutes"
    print(heading(f"{len(plan.seeds)} runs of {length}, {plan.tasks} held-out tasks"))
    print(report(measurements))
    write(arguments.json, measurements, bars(measurements))
    return status or (FAILED if measurements.notes else 0)


if __name__ == "__main__":
    sys.exit(main())
