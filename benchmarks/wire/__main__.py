"""The command `python -m benchmarks.wire`."""

import argparse
import platform
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from benchmarks.commandline import INTERRUPTED, choices, count, interrupt, progress, write
from benchmarks.wire import measures
from benchmarks.wire.bars import bars
from benchmarks.wire.contestants import DEFAULT_RELEASED_PYTHON
from benchmarks.wire.driver import DriverError
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.plan import SECTIONS, Plan
from benchmarks.wire.processes import StartError
from benchmarks.wire.report import report

_DESCRIPTION = """\
The cost of a step over the wire: the released server, the floor of the stack, and ours, each in its own process,
in alternating rounds under one driver. Prints medians and the bars."""

_EXAMPLES = """\
examples:
  python -m benchmarks.wire                                everything: about 15 minutes
  python -m benchmarks.wire --quick                        does it run? about half a minute
  python -m benchmarks.wire --only step --rounds 3         servers only
  python -m benchmarks.wire --only metrics --rounds 9      the cost of metrics
  python -m benchmarks.wire --only clients,imports         the cost on the client's side
  python -m benchmarks.wire --only concurrency --no-released
  python -m benchmarks.wire --json out.json                every round's figures into a file

sections:
  step         steps/s, latency, server CPU per step, memory, start-up
  metrics      server CPU per step with metrics, relative to without
  clients      CPU per step of our client and the released one
  imports      seconds over a bare interpreter
  concurrency  thousands of sessions whose step waits for a second"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status."""
    arguments = _parser().parse_args(argv)
    measurements = Measurements()
    plan = _plan(arguments, measurements)
    _raise_descriptor_limit()
    signal.signal(signal.SIGTERM, interrupt)
    status = 0
    try:
        _measure(plan, measurements, progress)
    except KeyboardInterrupt:
        status = INTERRUPTED
        measurements.notes.append("the rest: interrupted; every server that was started is stopped")
    progress("")
    all_bars = bars(measurements)
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}, medians of rounds\n")
    print(report(measurements, all_bars))
    write(arguments.json, measurements, all_bars)
    return status


def _measure(plan: Plan, measurements: Measurements, progress: Callable[[str], None]) -> None:
    for section in plan.sections:
        try:
            getattr(measures, section)(plan, measurements, progress)
        except (StartError, DriverError) as error:
            measurements.notes.append(f"the rest of {section}: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wire",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=count, metavar="N", help="rounds; 5 by default, 3 for concurrency")
    parser.add_argument("--quick", action="store_true", help="tiny numbers: shows that it runs, no more")
    parser.add_argument(
        "--only", type=choices(SECTIONS), metavar="SECTION,...", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures there")
    parser.add_argument(
        "--released-python",
        type=Path,
        metavar="PATH",
        default=DEFAULT_RELEASED_PYTHON,
        help="interpreter of an installation of the released package (.venvs/released-0.10.0/bin/python)",
    )
    parser.add_argument("--no-released", action="store_true", help="leave out the released package")
    return parser


def _plan(arguments: argparse.Namespace, measurements: Measurements) -> Plan:
    """Return the plan for this machine, and note what cannot be measured."""
    released = arguments.released_python.absolute()
    echoes = find_spec("orjson") is not None
    if not echoes:
        measurements.notes.append("the floor: expected orjson, got none; pip install 'ropewalk[bench]'")
    if not released.exists() and not arguments.no_released:
        measurements.notes.append(
            f"the released package: expected an interpreter at {released}, got none; make one with "
            "python scripts/bootstrap.py released-0.10.0, or name another with --released-python"
        )
    for note in measurements.notes:
        print(f"benchmarks.wire: going on without {note}", file=sys.stderr)
    plan = Plan(
        sections=arguments.only or SECTIONS,
        released=released if released.exists() and not arguments.no_released else None,
        echoes=echoes,
    )
    if arguments.quick:
        plan = plan.quick()
    return plan if arguments.rounds is None else plan.with_rounds(arguments.rounds)


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit; servers inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
