"""The guard: its command gets a grace period, and its exit status is passed on."""

import fcntl
import os
import resource
import subprocess
import sys
from pathlib import Path

from openenv_core.guard import guard_command

WAIT_TIMEOUT_S = 60
ORDERLY = """
import pathlib, signal, sys, time

def end(*_):
    time.sleep(0.2)
    pathlib.Path(sys.argv[1]).write_text("in order")
    sys.exit(7)

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
signal.pause()
"""


def test_command_gets_its_grace_period(tmp_path: Path) -> None:
    file = tmp_path / "ended"
    command = guard_command([sys.executable, "-c", ORDERLY, str(file)], grace_s=WAIT_TIMEOUT_S)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guard:
        assert guard.stdout.readline() == b"ready\n"
        guard.stdin.close()
        assert guard.wait(WAIT_TIMEOUT_S) == 7
    assert file.read_text() == "in order"


def test_missing_command_is_reported() -> None:
    command = guard_command(["/no/such/program"], grace_s=1.0)
    done = subprocess.run(
        command, stdin=subprocess.PIPE, capture_output=True, timeout=WAIT_TIMEOUT_S, check=False
    )
    assert done.returncode == 127
    assert b"cannot run '/no/such/program': No such file" in done.stderr


def test_lifeline_may_be_any_descriptor() -> None:
    """One of a program that has thousands open; select(2) would take none above 1023."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = 1500
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2 * number), limits[1]))
    read, write = os.pipe()
    try:
        lifeline = fcntl.fcntl(read, fcntl.F_DUPFD, number)
        command = guard_command(["sleep", "600"], grace_s=WAIT_TIMEOUT_S, lifeline=lifeline)
        with subprocess.Popen(command, pass_fds=[lifeline]) as guard:
            os.close(write)
            assert guard.wait(WAIT_TIMEOUT_S) == 128 + 15
        os.close(lifeline)
    finally:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
