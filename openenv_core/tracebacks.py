"""Tracebacks that start at the author's code, without our own frames."""

import importlib
import os
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

_HERE: Final = Path(__file__).parent
_NOT_THE_AUTHORS: Final = (
    *(f"{_HERE.parent / room}{os.sep}" for room in (_HERE.name, "servers", "rl_bridge")),
    f"{Path(importlib.__file__).parent}{os.sep}",
    "<frozen ",
)
"""Prefixes of files whose frames precede the author's."""


def authors_part(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback from the author's first frame on; None if no frame is the author's."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_NOT_THE_AUTHORS):
        traceback = traceback.tb_next
    return traceback


def in_place(error: BaseException) -> str:
    """Return an exception's text after ` in FILE, line N: `, the innermost line that is not ours; only `: ` without."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(_NOT_THE_AUTHORS):
            place = f" in {frame.f_code.co_filename}, line {line}"
    return f"{place}: {error}"


def format_traceback(error: BaseException) -> str:
    """Format an exception as Python does, from the author's first frame on."""
    lines = traceback.format_exception(type(error), error, authors_part(error))
    return "".join(lines).rstrip()


def show(error: Exception) -> None:
    """Print an exception to standard error, from the author's first frame on."""
    traceback.print_exception(error.with_traceback(authors_part(error)))
