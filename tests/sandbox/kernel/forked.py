"""Helpers of the kernel tests: forks for what cannot be undone, and interpreters for other users."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest


def in_fork(function: Callable[[], Any]) -> Any:
    """Run a function in a fork; return its result through JSON, or the text of its exception."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            output = json.dumps(function())
        except BaseException as error:
            output = json.dumps(f"{type(error).__name__}: {error}")
        os.write(write, output.encode())
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


def open_python(uid: int | None) -> str:
    """Return an interpreter outside of virtual environments that a user may execute."""
    for path in (str(sys._base_executable), "/usr/bin/python3"):  # type: ignore[attr-defined]
        command = [path, "-I", "-c", "import sys; raise SystemExit(sys.version_info < (3, 11))"]
        with contextlib.suppress(OSError):
            if subprocess.run(command, user=uid, group=uid, capture_output=True).returncode == 0:
                return path
    pytest.skip("needs a Python 3.11 that every user may run")
