"""What the commands of all benchmarks share: options, progress, the file of figures."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from benchmarks.wire.bars import Bar
from benchmarks.wire.figures import Figures


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
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
