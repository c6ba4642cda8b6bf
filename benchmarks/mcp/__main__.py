"""The command `python -m benchmarks.mcp`."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import commandline
from benchmarks.commandline import count, heading, measured, progress, write
from benchmarks.mcp.measures import Plan, measure
from benchmarks.mcp.report import report
from benchmarks.wire.processes import StartError

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
    parser = commandline.parser("mcp", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--rounds", type=count, metavar="N", help="5 by default")
    arguments = parser.parse_args(words)
    plan = Plan().quick() if arguments.quick else Plan()
    if arguments.rounds is not None:
        plan = replace(plan, rounds=arguments.rounds)
    figures, status = measured(lambda figures: measure(plan, figures, progress), StartError)
    print(heading(f"{plan.rounds} rounds"))
    print(report(figures))
    write(arguments.json, figures)
    return status


if __name__ == "__main__":
    sys.exit(main())
