"""The first process of a session's name space: it waits, and tells how the interpreter ended."""

import os
import socket
import struct
from typing import Final, NoReturn

from openenv_core.sandbox.kernel import libc

MOVED: Final = struct.Struct("qi")
"""From a fork to the zygote: its number, and the process that takes its place."""

BY_SIGNAL: Final = 128
"""Added to the signal that ended the interpreter."""


def become_first(number: int, zygote: socket.socket) -> None:
    """Fork the first process of the name space that was made for this one's children; return in it alone."""
    process = os.fork()
    if process:
        zygote.send(MOVED.pack(number, process))
        os._exit(0)


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
