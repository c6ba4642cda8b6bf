"""The command `python -m benchmarks.asynchrony`."""

import argparse
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.asynchrony.measures import Plan, measure
from benchmarks.asynchrony.report import bars, report
from benchmarks.commandline import count, interrupt, progress, write
from benchmarks.wire.figures import Figures
from rl_bridge.errors import BridgeError

INTERRUPTED = 130
FAILED = 2

_DESCRIPTION = """\
What asynchrony gains: one job with max_staleness 0, 1 and 4, the same batch, sessions and workers. Environments
sleep for log-normal times (sigma 1) in two worker processes, a trainer computes in a third; admission, ledger, buffer,
dispatcher, workers and services are those of training. Prints medians of alternating rounds."""

_EXAMPLES = """\
examples:
  python -m benchmarks.asynchrony              about seven minutes
  python -m benchmarks.asynchrony --quick      does it run?
  python -m benchmarks.asynchrony --rounds 1 --json out.json"""


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print what there is, and return the exit status: 0, or 2 where something did not work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.asynchrony",
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
    except BridgeError as error:
        status = FAILED
        figures.notes.append(f"the rest: {error}")
    progress("")
    job = plan.job
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}, {plan.rounds} rounds of "
        f"{job.iterations} steps, {job.groups_per_batch} groups of {job.group_size} a step, "
        f"{job.sessions * job.workers} sessions\n"
    )
    print(report(figures))
    write(arguments.json, figures, bars(figures))
    return status


if __name__ == "__main__":
    sys.exit(main())
