"""Runs a worker and ends everything that it started.

    python _guard.py FD COMMAND...

The guard stands between the pool and one of its workers. Its standard input is a pipe whose other end only the
pool's process holds: when that end closes, because the pool asked for it or because its process died of whatever
cause, the guard kills the worker and all of its descendants. It does so too when the worker ends by itself. What a
worker starts cannot slip away by becoming a daemon: orphans become the guard's children (on Linux). Should the guard
itself be killed, the kernel kills the worker.

FD is a socket that the worker inherits. Only the standard library is used, and the file is run by its path, so that
the guard starts in a few milliseconds whatever is installed.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

OWNER_CHECK_INTERVAL_S = 0.5
"""A fork of the pool's process may hold the pipe open after its death, so the parent is looked at too."""
REAP_TIMEOUT_S = 5.0
"""How long the dead may take to be reaped: one in the middle of a disk access takes as long as that does."""
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
SET_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def main(arguments: list[str]) -> int:
    """Run the command until it ends or the pipe closes."""
    fd, command = int(arguments[0]), arguments[1:]
    owner, guard = os.getppid(), os.getpid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the pool decides
    wake = _wake_on_death()
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else lambda *_: None
    prctl(SET_SUBREAPER, 1, 0, 0, 0)

    def in_child() -> None:
        prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != guard:
            os.kill(os.getpid(), signal.SIGKILL)  # the guard died before the call
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    worker = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=(fd,), start_new_session=True, preexec_fn=in_child
    )
    os.close(fd)
    _watch(worker, owner, wake)
    _end(worker)
    return worker.returncode if worker.returncode >= 0 else 128 - worker.returncode


def _wake_on_death() -> int:
    """Return a descriptor that becomes readable when a child has ended."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read


def _watch(worker: "subprocess.Popen[bytes]", owner: int, wake: int) -> None:
    while worker.poll() is None and os.getppid() == owner:
        ready, _, _ = select.select([0, wake], [], [], OWNER_CHECK_INTERVAL_S)
        if wake in ready:
            os.read(wake, 512)
        if 0 in ready and not os.read(0, 1):
            return


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """Kill until there is nothing left to kill: the children of those that die become this process's."""
    deadline = time.monotonic() + REAP_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        for child in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        worker.poll()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        time.sleep(0.001)
    worker.wait()


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []  # no Linux: the worker's group has to do


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
