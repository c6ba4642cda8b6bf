"""Shared by the commands of all benchmarks: options, progress, the result file."""

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
from benchmarks.wire.measurements import Measurements

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it."""
FAILED = 2


def create_parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Return the parser of `python -m benchmarks.NAME`, with the options common to all benchmarks."""
    argument_parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    argument_parser.add_argument(
        "--quick", action="store_true", help="tiny numbers, which only show that it runs"
    )
    argument_parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the measurements of every round to this file"
    )
    return argument_parser


def run_measurement(
    measure: Callable[[Measurements], None],
    *failures: type[Exception],
    interrupted: str = "every process that was started is stopped",
) -> tuple[Measurements, int]:
    """Run a benchmark and keep its measurements even if it fails or is interrupted.

    Args:
        measure: Adds to the measurements.
        failures: Expected errors; any other is a bug of the benchmark and is raised.
        interrupted: Noted after Ctrl-C.

    Returns:
        The measurements, with a note if they are incomplete, and the exit status.
    """
    measurements = Measurements()
    signal.signal(signal.SIGTERM, interrupt)
    status = 0
    try:
        measure(measurements)
    except KeyboardInterrupt:
        status = INTERRUPTED
        measurements.notes.append(f"the rest: interrupted; {interrupted}")
    except failures as error:
        status = FAILED
        measurements.notes.append(f"the rest: {error}")
    progress("")
    return measurements, status


def heading(about: str) -> str:
    """Return the line above the tables: the time, the Python version, and `about`."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}, {about}\n"


def count(text: str) -> int:
    """Parse an option that is a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def choices(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return an argparse type: a comma-separated list of allowed names."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.replace(",", " ").split())
        if not names or not set(names) <= set(allowed):
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(allowed)}, got {text!r}")
        return names

    return read


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Handle a signal as Ctrl-C."""
    raise KeyboardInterrupt


def progress(text: str) -> None:
    """Report what is being measured: a terminal's line is overwritten, elsewhere each report is a new line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def write(path: Path | None, measurements: Measurements, all_bars: Iterable[Bar] = ()) -> None:
    """Write the measurements of every round to `path`, if given."""
    if path is not None:
        document = {
            **measurements.as_json(),
            "bars": [{"what": bar.label, "value": bar.value, "met": bar.met} for bar in all_bars],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
