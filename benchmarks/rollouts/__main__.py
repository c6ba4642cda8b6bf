"""The command `python -m benchmarks.rollouts`."""

import argparse
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.commandline import count, interrupt, progress, write
from benchmarks.rollouts.measures import Plan, measure
from benchmarks.rollouts.report import bars, report
from benchmarks.wire.figures import Figures
from openenv_core.errors import ProviderError
from rl_bridge.errors import BridgeError

INTERRUPTED = 130
FAILED = 2

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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollouts",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=count, metavar="N", help="3 by default")
    parser.add_argument("--quick", action="store_true", help="tiny numbers: shows that it runs, no more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures there")
    arguments = parser.parse_args(words)
    plan = Plan().quick() if arguments.quick else Plan()
    if arguments.rounds is not None:
        plan = replace(plan, rounds=arguments.rounds)
    figures = Figures()
    signal.signal(signal.SIGTERM, interrupt)
    status = 0
    try:
        measure(plan, figures, progress)
    except KeyboardInterrupt:
        status = INTERRUPTED
        figures.notes.append("the rest: interrupted; every process that was started is stopped")
    except (BridgeError, ProviderError) as error:
        status = FAILED
        figures.notes.append(f"the rest: {error}")
    progress("")
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}, {plan.rounds} rounds\n"
    )
    print(report(figures))
    write(arguments.json, figures, bars(figures))
    return status


if __name__ == "__main__":
    sys.exit(main())
