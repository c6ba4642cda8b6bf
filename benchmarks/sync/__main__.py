"""The command `python -m benchmarks.sync`."""

import argparse
import asyncio
import platform
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.commandline import count, interrupt, progress, write
from benchmarks.sync.measures import BUSY, IDLE, WHOLE, synchronisations
from benchmarks.wire.bars import Bar
from benchmarks.wire.figures import Figures
from benchmarks.wire.report import table
from rl_bridge.errors import BridgeError

INTERRUPTED = 130
FAILED = 2
BOUND = 1.3

_DESCRIPTION = """\
What a synchronisation of weights costs as a whole, from the trainer's tensors to a vLLM engine in another process
that samples from them; beside it, in every round, the engine's reload of the same weights from memory of its own.
Needs vLLM and Monarch."""

_EXAMPLES = """\
examples:
  python -m benchmarks.sync                     100 million parameters, about two minutes
  python -m benchmarks.sync --quick             does it run?
  python -m benchmarks.sync --json out.json     every round's figures into a file"""


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print what there is, and return the exit status: 0, or 2 where something did not work."""
    arguments = _parser().parse_args(words)
    figures = Figures()
    signal.signal(signal.SIGTERM, interrupt)
    parameters, rounds = (45_000_000, 2) if arguments.quick else (arguments.parameters, arguments.rounds)
    status = 0
    try:
        asyncio.run(synchronisations(parameters, rounds, figures, progress))
    except KeyboardInterrupt:
        status = INTERRUPTED
        figures.notes.append("the rest: interrupted")
    except BridgeError as error:
        status = FAILED
        figures.notes.append(f"the rest: {error}")
    progress("")
    held = _bars(figures)
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}, {rounds} rounds\n")
    print(_report(figures, held))
    write(arguments.json, figures, held)
    return status


def _bars(figures: Figures) -> list[Bar]:
    found = ((state, figures.median(WHOLE, state)) for state in (IDLE, BUSY))
    return [Bar(f"{WHOLE}, {state}", value, BOUND, "at most") for state, value in found if value is not None]


def _report(figures: Figures, held: Sequence[Bar]) -> str:
    rows = [(name, who, f"{figures.median(name, who):.4g}") for name, who, _ in figures.values]
    parts = [table(("median of", "", ""), rows)] if rows else []
    if held:
        told = [
            (bar.what, f"{bar.value:.2f}", f"{bar.kind} {bar.bound:g}", "met" if bar.met else "NOT met")
            for bar in held
        ]
        parts.append("### It must show\n\n" + table(("what", "measured", "bar", ""), told))
    if figures.notes:
        parts.append("### Not measured\n\n" + "\n".join(f"- {note}" for note in figures.notes))
    return "\n\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sync",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--parameters", type=count, default=100_000_000, metavar="N", help="of the model (%(default)s)")
    add("--rounds", type=count, default=10, metavar="N", help="synchronisations of each kind (%(default)s)")
    add("--quick", action="store_true", help="tiny numbers: shows that it runs, no more")
    add("--json", type=Path, metavar="FILE", help="write every round's figures there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
