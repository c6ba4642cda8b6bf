"""The command `python -m benchmarks.routing`."""

import argparse
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.commandline import count, interrupt, progress, write
from benchmarks.routing.measures import Plan, measure
from benchmarks.routing.report import bars, report
from benchmarks.wire.figures import Figures
from rl_bridge.errors import BridgeError

INTERRUPTED = 130
FAILED = 2

_DESCRIPTION = """\
What least-loaded routing gains: the same heavy-tailed jobs over the replicas of a real service, least loaded and in
turns, with all replicas alike and with one slowed three times. And what a routed call costs beside a bare one of
Monarch. Prints medians over seeds."""

_EXAMPLES = """\
examples:
  python -m benchmarks.routing                 about four minutes
  python -m benchmarks.routing --quick         does it run?
  python -m benchmarks.routing --seeds 3 --json out.json"""


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print what there is, and return the exit status: 0, or 2 where something did not work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=count, metavar="N", help="10 by default")
    parser.add_argument("--quick", action="store_true", help="tiny numbers: shows that it runs, no more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures there")
    arguments = parser.parse_args(words)
    plan = Plan().quick() if arguments.quick else Plan()
    if arguments.seeds is not None:
        plan = replace(plan, seeds=arguments.seeds)
    figures = Figures()
    signal.signal(signal.SIGTERM, interrupt)
    status = 0
    try:
        measure(plan, figures, progress)
    except KeyboardInterrupt:
        status = INTERRUPTED
        figures.notes.append("the rest: interrupted; every process that was started is stopped")
    except BridgeError as error:
        status = FAILED
        figures.notes.append(f"the rest: {error}")
    progress("")
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}, {plan.seeds} seeds of "
        f"{plan.jobs} jobs, {plan.callers} callers, {plan.replicas} replicas\n"
    )
    print(report(figures))
    write(arguments.json, figures, bars(figures))
    return status


if __name__ == "__main__":
    sys.exit(main())
