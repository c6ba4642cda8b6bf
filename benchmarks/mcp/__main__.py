"""The command `python -m benchmarks.mcp`."""

import argparse
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.commandline import count, interrupt, progress, write
from benchmarks.mcp.measures import Plan, measure
from benchmarks.mcp.report import report
from benchmarks.wire.figures import Figures
from benchmarks.wire.processes import StartError

INTERRUPTED = 130
FAILED = 2

_DESCRIPTION = """\
What a call of a trivial tool costs: as a step, by JSON-RPC as released clients call, over MCP with a handshake and
without; beside the same tool on the SDK's own server, and the SDK's call in one process with nothing between. Prints
medians of alternating rounds."""

_EXAMPLES = """\
examples:
  python -m benchmarks.mcp                     about six minutes
  python -m benchmarks.mcp --quick             does it run?
  python -m benchmarks.mcp --rounds 3 --json out.json"""


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print what there is, and return the exit status: 0, or 2 where something did not work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mcp",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=count, metavar="N", help="5 by default")
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
    except StartError as error:
        status = FAILED
        figures.notes.append(f"the rest: {error}")
    progress("")
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}, {plan.rounds} rounds\n"
    )
    print(report(figures))
    write(arguments.json, figures)
    return status


if __name__ == "__main__":
    sys.exit(main())
