"""What the commands of all benchmarks share: options, progress, the file of figures."""

import argparse
import json
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from benchmarks.wire.bars import Bar
from benchmarks.wire.figures import Figures

INTERRUPTED = 130
"""As a shell has it of a program that Ctrl-C ended."""
FAILED = 2


def parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Return the parser of `python -m benchmarks.NAME`, with the options that all of them have."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="tiny numbers: shows that it runs, no more")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures there")
    return made


def measured(
    measure: Callable[[Figures], None],
    *failures: type[Exception],
    interrupted: str = "every process that was started is stopped",
) -> tuple[Figures, int]:
    """Measure, and keep what was measured whatever happens.

    Args:
        measure: Adds to the figures.
        failures: What may end it; anything else is a mistake of the benchmark's.
        interrupted: What is said to be true after Ctrl-C.

    Returns:
        The figures, with a note where they are not all, and the exit status.
    """
    figures = Figures()
    signal.signal(signal.SIGTERM, interrupt)
    status = 0
    try:
        measure(figures)
    except KeyboardInterrupt:
        status = INTERRUPTED
        figures.notes.append(f"the rest: interrupted; {interrupted}")
    except failures as error:
        status = FAILED
        figures.notes.append(f"the rest: {error}")
    progress("")
    return figures, status


def heading(about: str) -> str:
    """Return the line above the tables: when, with which Python, and what about."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}, {about}\n"


def count(text: str) -> int:
    """Read an option that is a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def some(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return what reads an option that is some of a few names."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.replace(",", " ").split())
        if not names or not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {text!r}")
        return names

    return read


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Let a signal end a benchmark as Ctrl-C does."""
    raise KeyboardInterrupt


def progress(text: str) -> None:
    """Say what is measured: on one line that is written over, or a line each where that is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def write(path: Path | None, figures: Figures, held: Iterable[Bar] = ()) -> None:
    """Write every round's figures into a file, where one is named."""
    if path is not None:
        found = {
            **figures.as_json(),
            "bars": [{"what": bar.what, "value": bar.value, "met": bar.met} for bar in held],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
