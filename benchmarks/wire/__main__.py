"""The command `python -m benchmarks.wire`."""

import argparse
import json
import platform
import resource
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from benchmarks.wire import measures
from benchmarks.wire.bars import bars
from benchmarks.wire.contestants import DEFAULT_RELEASED_PYTHON
from benchmarks.wire.driver import DriverError
from benchmarks.wire.figures import Figures
from benchmarks.wire.plan import SECTIONS, Plan
from benchmarks.wire.processes import StartError
from benchmarks.wire.report import report

INTERRUPTED = 130

_DESCRIPTION = """\
What a step over the wire costs: the released server, the floor of the stack, and ours, each in a process of
its own, in alternating rounds under one driver. Prints medians, and the bars that they are held against."""

_EXAMPLES = """\
examples:
  python -m benchmarks.wire                                everything: about 15 minutes
  python -m benchmarks.wire --quick                        does it run? about half a minute
  python -m benchmarks.wire --only step --rounds 3         servers alone
  python -m benchmarks.wire --only clients,imports         what callers pay
  python -m benchmarks.wire --only concurrency --no-released
  python -m benchmarks.wire --json out.json                every round's figures into a file

sections:
  step         steps/s, latency, server CPU a step, memory, start-up
  clients      CPU a step of our client and the released one
  imports      seconds over a bare interpreter
  concurrency  thousands of sessions whose step waits for a second"""


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print what there is, and return the exit status."""
    arguments = _parser().parse_args(words)
    figures = Figures()
    plan = _plan(arguments, figures)
    _raise_descriptor_limit()
    signal.signal(signal.SIGTERM, _interrupt)
    progress = _Progress()
    status = 0
    try:
        _measure(plan, figures, progress)
    except KeyboardInterrupt:
        status = INTERRUPTED
        figures.notes.append("the rest: interrupted; every server that was started is stopped")
    progress.clear()
    held = bars(figures)
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}, medians of rounds\n")
    print(report(figures, held))
    if arguments.json is not None:
        found = {
            **figures.as_json(),
            "bars": [{"what": b.what, "value": b.value, "met": b.met} for b in held],
        }
        arguments.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return status


def _measure(plan: Plan, figures: Figures, progress: "_Progress") -> None:
    for section in plan.sections:
        try:
            getattr(measures, section)(plan, figures, progress)
        except (StartError, DriverError) as error:
            figures.notes.append(f"the rest of {section}: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wire",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=_count, metavar="N", help="rounds; 5 by default, 3 for concurrency")
    parser.add_argument("--quick", action="store_true", help="tiny numbers: shows that it runs, no more")
    parser.add_argument("--only", type=_sections, metavar="SECTION,...", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures there")
    parser.add_argument(
        "--released-python",
        type=Path,
        metavar="PATH",
        default=DEFAULT_RELEASED_PYTHON,
        help="interpreter of an installation of the released package (.venvs/released-0.10.0/bin/python)",
    )
    parser.add_argument("--no-released", action="store_true", help="go without the released package")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.replace(",", " ").split())
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(SECTIONS)}, got {text!r}")
    return names


def _plan(arguments: argparse.Namespace, figures: Figures) -> Plan:
    """Return what to measure here, and note what cannot be."""
    released = arguments.released_python.absolute()
    echoes = find_spec("orjson") is not None
    if not echoes:
        figures.notes.append("the floor: expected orjson, got none; pip install 'ropewalk[bench]'")
    if not released.exists() and not arguments.no_released:
        figures.notes.append(
            f"the released package: expected an interpreter at {released}, got none; make one with "
            "python scripts/bootstrap.py released-0.10.0, or name another with --released-python"
        )
    for note in figures.notes:
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
    """Allow as many sockets as the system does; servers inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Progress:
    """One line on standard error that is written over; a line each where that is no terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        print(
            f"\r\x1b[K{text}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr
        )
        sys.stderr.flush()

    def clear(self) -> None:
        """Make room for what is printed next."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
