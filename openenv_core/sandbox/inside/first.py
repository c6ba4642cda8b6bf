"""The first process of a session's name space: it waits, and tells how the interpreter ended."""

import os
from typing import Final, NoReturn

from openenv_core.sandbox.kernel import libc

BY_SIGNAL: Final = 128
"""Added to the signal that ended the interpreter."""


def wait_for(interpreter: int, *, successors: bool) -> NoReturn:
    """Bury whatever ends, and end with the interpreter.

    Args:
        interpreter: Its process.
        successors: It may hand over to others; then the last one counts.
    """
    libc.close_from(0)
    code = 0
    while True:
        try:
            process, status = os.wait()
        except ChildProcessError:
            os._exit(code)
        ended = os.waitstatus_to_exitcode(status)
        code = BY_SIGNAL - ended if ended < 0 else ended
        if process == interpreter and not successors:
            os._exit(code)
