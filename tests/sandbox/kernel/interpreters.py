"""Helpers of the kernel tests: interpreters for what cannot be undone, and for other users."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import cloudpickle
import pytest

_RUN: Final = """
import json, sys
import cloudpickle
try:
    output = cloudpickle.load(sys.stdin.buffer)()
except BaseException as error:
    output = f"{type(error).__name__}: {error}"
print(json.dumps(output))
"""


def in_process(function: Callable[[], Any], *, descriptors: tuple[int, ...] = ()) -> Any:
    """Run a function in an interpreter of its own; return its result through JSON, or the text of its exception.

    A fork will not do: libraries start threads in forks of this process (OpenTelemetry's exporters for one), and glibc
    aborts a process whose threads disagree on whether they may change their user.

    Args:
        function: The function, with what it uses; sockets and patches stay behind.
        descriptors: What it inherits.
    """
    run = subprocess.run(
        [sys.executable, "-c", _RUN],
        input=cloudpickle.dumps(function),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        pass_fds=descriptors,
    )
    assert run.returncode == 0, f"the interpreter ended with {run.returncode}"
    return json.loads(run.stdout)


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
