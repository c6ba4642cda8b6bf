"""Tracebacks of what an author's code raises, without the way that led there."""

import importlib
import os
import traceback
from pathlib import Path
from typing import Final

import openenv_core

_NOT_THE_AUTHORS: Final = (
    f"{Path(__file__).parent}{os.sep}",
    f"{Path(openenv_core.__file__).parent}{os.sep}",
    f"{Path(importlib.__file__).parent}{os.sep}",
    "<frozen ",
)
"""Beginnings of the names of files that lead to the author's."""


def show(error: Exception) -> None:
    """Print an exception to standard error, from the author's first line on: ours say nothing of what is wrong."""
    there = error.__traceback__
    while there is not None and there.tb_frame.f_code.co_filename.startswith(_NOT_THE_AUTHORS):
        there = there.tb_next
    traceback.print_exception(error.with_traceback(there))
