"""The command `python -m benchmarks.rollouts`."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import commandline
from benchmarks.commandline import count, heading, measured, progress, write
from benchmarks.rollouts.measures import Plan, measure
from benchmarks.rollouts.report import bars, report
from openenv_core.errors import ProviderError
from rl_bridge.errors import BridgeError

_DESCRIPTION = """\
How many episodes a rollout worker plays with 1 to 256 sessions against one environment server, with a policy that
answers at once: of an environment that waits, where a session more is as good as another server, and of BlackJack,
where the two processes have all to do. Prints medians of alternating rounds."""

_EXAMPLES = """\
examples:
  python -m benchmarks.rollouts              about four minutes
  python -m benchmarks.rollouts --quick      does it run?
  python -m benchmarks.rollouts --rounds 1 --json out.json"""


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print what there is, and return the exit status: 0, or 2 where something did not work."""
    parser = commandline.parser("rollouts", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--rounds", type=count, metavar="N", help="3 by default")
    arguments = parser.parse_args(words)
    plan = Plan().quick() if arguments.quick else Plan()
    if arguments.rounds is not None:
        plan = replace(plan, rounds=arguments.rounds)
    figures, status = measured(lambda figures: measure(plan, figures, progress), BridgeError, ProviderError)
    print(heading(f"{plan.rounds} rounds"))
    print(report(figures))
    write(arguments.json, figures, bars(figures))
    return status


if __name__ == "__main__":
    sys.exit(main())
