"""Runs a function in a fork of the test's process, for what cannot be taken back."""

import json
import os
from collections.abc import Callable
from typing import Any


def in_fork(function: Callable[[], Any]) -> Any:
    """What the function returned, as JSON carries it; an exception's text where it raised."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = json.dumps(function())
        except BaseException as error:
            said = json.dumps(f"{type(error).__name__}: {error}")
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said_bytes = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the fork ended with {os.waitstatus_to_exitcode(status)}"
    return json.loads(said_bytes)


def outcome(function: Callable[[], object]) -> str:
    """ "done", or what it raised."""
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return "done"
