"""Runs one command, and ends it and its children when the program that started the guard closes a pipe or dies.

    python -I -S guard.py LIFELINE STATUS KEPT GRACE_S FOLDER SCOPE COMMAND...

LIFELINE is the read end of a pipe. End of file on it, when the program closes it or dies (even by SIGKILL), ends the
command: SIGTERM to its process group, SIGKILL after GRACE_S seconds. SIGTERM to the guard does the same with LIFELINE
0, and otherwise the same as a byte on LIFELINE. SIGUSR1 is passed on to the command. If the guard itself is killed, the
kernel kills the command (on Linux).

With LIFELINE 0 the command has no input. Otherwise it owns standard input, output and error, and the guard closes its
copies; a byte on LIFELINE then says that the program has closed the command's input as a first request to exit, which
also has GRACE_S seconds before SIGTERM. KEPT is a descriptor that the command inherits, or -1. SCOPE is `group` or
`all`; with `all` the guard is the subreaper of the command's descendants and also kills those that left its group and
parent. Events are written to STATUS, one per line: `started PID`, `failed ERRNO`, `ended CODE`; the guard then stays
until LIFELINE has a byte or ends. Before it exits it removes FOLDER, unless a byte or SIGTERM has requested the end.
STATUS may be -1, in which case the guard does not stay, and FOLDER empty.

Uses only the standard library and is run by its path, so that it starts in a few milliseconds.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

PARENT_CHECK_INTERVAL_S = 0.5
"""A fork of the program may hold the lifeline open after the program's death, so the parent is polled too."""

KILL_TIMEOUT_S = 3.0
"""How long to wait for killed processes to be reaped: one in uninterruptible I/O dies only when that is done."""
POLL_INTERVAL_S = 0.005

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
PR_SET_CHILD_SUBREAPER = 36


def guard_command(
    command: Sequence[str],
    *,
    grace_s: float,
    lifeline: int = 0,
    status: int = -1,
    inherited_fd: int = -1,
    folder: str = "",
    everything: bool = False,
) -> list[str]:
    """Return a command line that runs `command` under a guard; the module's docstring explains the arguments."""
    scope = "all" if everything else "group"
    options = [str(lifeline), str(status), str(inherited_fd), str(grace_s), folder, scope]
    return [sys.executable, "-I", "-S", __file__, *options, *command]


def main(arguments: list[str]) -> int:
    """Run the command until it ends, and return its exit status."""
    lifeline, status, inherited_fd = map(int, arguments[:3])
    grace_s, folder, everything = float(arguments[3]), arguments[4], arguments[5] == "all"
    command = arguments[6:]
    for fd in {lifeline, status} - {-1}:
        os.set_inheritable(fd, False)
    parent = os.getppid()
    signal_pipe = _open_signal_pipe(signal.SIGCHLD, signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGHUP):  # from a terminal: the program decides what to do
        signal.signal(number, signal.SIG_IGN)
    if everything:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        child = _start(command, without_input=lifeline == 0)
    except OSError as error:
        _report(status, f"failed {error.errno}")
        sys.stderr.write(f"cannot run {command[0]!r}: {error.strerror}\n")
        return 127
    if inherited_fd >= 0:
        os.close(inherited_fd)
    signal.signal(signal.SIGUSR1, lambda number, _: _forward(child, number))
    if lifeline != 0:
        _close_standard_streams()
    _report(status, f"started {child}")
    code, requested = _watch(child, lifeline, signal_pipe, parent)
    if code is None:
        term_wait_s = grace_s if requested and lifeline != 0 else 0.0
        code = _end(child, signal_pipe, term_wait_s, grace_s)
    _kill_remaining(child, everything)
    _report(status, f"ended {code}")
    while requested is None and status >= 0:
        _, requested = _watch(0, lifeline, signal_pipe, parent)
    if folder and not requested:
        remove_tree(folder)
    return code if code >= 0 else 128 - code


def remove_tree(root: str) -> None:
    """Remove a folder recursively, as far as permissions allow.

    A command may leave unreadable folders, or a tree deeper than the recursion and descriptor limits; so each folder
    is made accessible and moved up to the root before it is scanned.
    """
    number, mark = 0, os.urandom(8).hex()
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            os.chmod(folder, 0o700)
            with os.scandir(folder) as entries:
                children = list(entries)
        except OSError:
            continue
        for entry in children:
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)  # a folder that cannot be written cannot be moved
                number += 1
                moved_path = os.path.join(root, f".{mark}-{number}")
                os.rename(entry.path, moved_path)
                folders.append(moved_path)
        if folder != root:
            with suppress(OSError):
                os.rmdir(folder)
    with suppress(OSError):
        os.rmdir(root)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _open_signal_pipe(*signals: signal.Signals) -> int:
    """Return a descriptor that becomes readable when one of the signals arrives."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, _on_signal)
    return read


_terminated = False


def _on_signal(number: int, _: object) -> None:
    global _terminated
    _terminated = _terminated or number == signal.SIGTERM


def _start(command: list[str], *, without_input: bool) -> int:
    """Start the command and return its pid. OSError: It cannot be executed."""
    guard = os.getpid()

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(127)  # the guard died before the call

    source = subprocess.DEVNULL if without_input else None
    child = subprocess.Popen(
        command, stdin=source, close_fds=False, start_new_session=True, preexec_fn=prepare
    )
    child.returncode = 0  # the guard reaps it, not the object
    return child.pid


def _close_standard_streams() -> None:
    """Close the guard's copies, so that the program sees end of file when the command exits."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _report(status: int, line: str) -> None:
    with suppress(OSError):  # the reader may be gone, or STATUS may be -1
        os.write(status, line.encode() + b"\n")


def _watch(child: int, lifeline: int, signal_pipe: int, parent: int) -> "tuple[int | None, bool | None]":
    """Wait for an event; return the child's exit code, if it has ended, and whether the end was requested.

    The second is True for a byte on the lifeline or SIGTERM; False if the lifeline ended without a byte or the program
    died; and None if only the child has ended.
    """
    while True:
        ready = _wait_readable(PARENT_CHECK_INTERVAL_S, lifeline, signal_pipe)
        if signal_pipe in ready:
            os.read(signal_pipe, 512)
        code = _reap(child)
        if lifeline in ready:
            return code, bool(os.read(lifeline, 1))
        if os.getppid() != parent:
            return code, False
        if code is not None:
            return code, None
        if _terminated:
            return None, True


def _wait_readable(timeout_s: float, *fds: int) -> list[int]:
    """Return the descriptors that are readable or at end of file. select(2) cannot handle those above 1023."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(timeout_s * 1000)]


def _reap(child: int) -> "int | None":
    """Reap all dead children; return the exit code of `child`, if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)


def _end(child: int, signal_pipe: int, term_wait_s: float, grace_s: float) -> int:
    """End the command: wait `term_wait_s`, if any, after its input was closed, then SIGTERM, then SIGKILL."""
    if term_wait_s and (code := _wait(child, signal_pipe, term_wait_s)) is not None:
        return code
    _signal_group(child, signal.SIGTERM)
    if (code := _wait(child, signal_pipe, grace_s)) is not None:
        return code
    _signal_group(child, signal.SIGKILL)
    code = _wait(child, signal_pipe, KILL_TIMEOUT_S)
    return -signal.SIGKILL if code is None else code


def _wait(child: int, signal_pipe: int, seconds: float) -> "int | None":
    deadline = time.monotonic() + seconds
    while (code := _reap(child)) is None and (left := deadline - time.monotonic()) > 0:
        if _wait_readable(left, signal_pipe):
            os.read(signal_pipe, 512)
    return code


def _signal_group(group: int, number: signal.Signals) -> None:
    # The group may be empty; macOS raises EPERM for a group of zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _forward(child: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, number)


def _kill_remaining(child: int, everything: bool) -> None:
    """Kill the rest of the command's group and, with `everything`, its other descendants until none is left."""
    _signal_group(child, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while everything and time.monotonic() < deadline:
        _reap(child)
        remaining = _children()
        if not remaining:
            return
        for pid in remaining:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)


def _children() -> list[int]:
    """Return the pids of this process's children; empty without /proc. Those of a killed child become its own."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
