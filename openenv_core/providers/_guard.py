"""Runs a command and never outlives whoever asked for it.

    python _guard.py GRACE_S FD COMMAND...

The guard stands between a program and its server. Its standard input is a pipe whose other end only the
program holds: when that end closes, because the program asked for it or because it died of whatever cause,
SIGKILL included, the guard ends the command's whole process group, first with SIGTERM, then after GRACE_S
seconds with SIGKILL. Should the guard itself be killed, the kernel ends the command (on Linux).

FD is a listening socket that the command inherits. Only the standard library is used, and the file is run by
its path, so that the guard starts in a few milliseconds whatever is installed.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

PARENT_CHECK_INTERVAL_S = 0.5
"""A fork of the program may hold the pipe open after the program's death, so the parent is looked at too."""


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    grace_s, fd, command = float(arguments[0]), int(arguments[1]), arguments[2:]
    parent = os.getppid()
    wake = _wake_on(signal.SIGCHLD, signal.SIGTERM)
    # Ctrl-C reaches every process of a terminal; the program decides what becomes of its server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=(fd,),
        start_new_session=True,
        preexec_fn=_die_with(os.getpid()),
    )
    os.close(fd)
    try:
        _watch(child, parent, wake)
    finally:
        _end_group(child, grace_s, wake)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _wake_on(*signals: signal.Signals) -> int:
    """Return a descriptor that becomes readable when one of the signals arrives."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.set_blocking(read, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, _seen)
    return read


_terminated = False


def _seen(number: int, _: object) -> None:
    global _terminated
    _terminated = _terminated or number == signal.SIGTERM


def _watch(child: "subprocess.Popen[bytes]", parent: int, wake: int) -> None:
    """Return when the command has ended, or when it has to."""
    while child.poll() is None and not _terminated and os.getppid() == parent:
        ready, _, _ = select.select([0, wake], [], [], PARENT_CHECK_INTERVAL_S)
        if 0 in ready and not os.read(0, 1):
            return
        if wake in ready:
            os.read(wake, 512)


def _end_group(child: "subprocess.Popen[bytes]", grace_s: float, wake: int) -> None:
    """End the command and whatever it started in its group."""
    _signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while child.poll() is None and (left := deadline - time.monotonic()) > 0:
        if select.select([wake], [], [], left)[0]:
            os.read(wake, 512)
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    # Nobody may be left; macOS reports a group of zombies as forbidden.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _die_with(guard: int) -> Callable[[], None] | None:
    """Return what makes the command die with the guard, where the kernel can do that."""
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>

    def before_exec() -> None:
        prctl(set_death_signal, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != guard:
            os.kill(os.getpid(), signal.SIGKILL)  # the guard died before the call

    return before_exec


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
