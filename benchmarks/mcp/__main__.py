"""The command `python -m benchmarks.mcp`."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import commandline
from benchmarks.commandline import count, heading, progress, run_measurement, write
from benchmarks.mcp.measures import Plan, measure
from benchmarks.mcp.report import report
from benchmarks.wire.processes import StartError

_DESCRIPTION = """\
The cost of a call of a trivial tool: as a step, by JSON-RPC as released clients call, and over MCP with and without a
handshake; compared with the same tool on the SDK's own server, and with the SDK's in-process call. Prints medians of
alternating rounds."""

_EXAMPLES = """\
examples:
  python -m benchmarks.mcp                     about six minutes
  python -m benchmarks.mcp --quick             does it run?
  python -m benchmarks.mcp --rounds 3 --json out.json"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status: 0, or 2 where a measurement failed."""
    parser = commandline.create_parser("mcp", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--rounds", type=count, metavar="N", help="5 by default")
    arguments = parser.parse_args(argv)
    plan = Plan().quick() if arguments.quick else Plan()
    if arguments.rounds is not None:
        plan = replace(plan, rounds=arguments.rounds)
    measurements, status = run_measurement(
        lambda measurements: measure(plan, measurements, progress), StartError
    )
    print(heading(f"{plan.rounds} rounds"))
    print(report(measurements))
    write(arguments.json, measurements)
    return status


if __name__ == "__main__":
    sys.exit(main())
