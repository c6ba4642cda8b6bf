"""Runs one tool server and ends it, with all that it started, whatever becomes of the program that asked.

    python -I -S _guard.py LIFELINE STATUS GRACE_S FOLDER COMMAND...

Standard input, output and error are the tool server's own; the guard keeps none of them. LIFELINE is the reading end
of a pipe. A byte on it asks for an orderly end; its end, which the program's death brings, for one without patience,
and FOLDER is then removed. What happens is written to STATUS, a line each: `started PID`, `failed ERRNO`,
`ended CODE`.

The guard is the subreaper of what the tool server starts: a process that leaves its group and its parent becomes the
guard's child, and is found. Should the guard itself be killed, the kernel ends the tool server (on Linux). Only the
standard library is used, and the file is run by its path, so that it starts in a few milliseconds.
"""

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress

PARENT_CHECK_INTERVAL_S = 1.0
"""A fork of the program may hold the lifeline open after the program's death, so the parent is looked at too."""

ORPHAN_GRACE_PERIOD_S = 0.5
KILL_TIMEOUT_S = 3.0
POLL_INTERVAL_S = 0.005

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> None:
    """Run the command to its end."""
    lifeline, status, grace_s = int(arguments[0]), int(arguments[1]), float(arguments[2])
    folder, command = arguments[3], arguments[4:]
    for fd in (lifeline, status):
        os.set_inheritable(fd, False)
    parent = os.getppid()
    wake = _wake_on(signal.SIGCHLD, signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child, error = _start(command)
    if child is None:
        _report(status, f"failed {error}")
        return
    _let_go_of_the_wire()
    _report(status, f"started {child}")
    code, asked = _watch(child, lifeline, wake, parent)
    if code is None:
        code = _ask_to_end(child, wake, grace_s if asked else ORPHAN_GRACE_PERIOD_S, asked=bool(asked))
    _kill_all(child)
    _report(status, f"ended {code}")
    while asked is None:
        _, asked = _watch(0, lifeline, wake, parent)
    if not asked and folder:
        remove_tree(folder)


def remove_tree(root: str) -> None:
    """Remove a folder and all that is in it, as far as this user may.

    A tool server may leave folders that nobody can look into, and a tree that is deeper than a program has calls or
    descriptors: each folder is moved up to the root before it is looked into.
    """
    number, mark = 0, os.urandom(8).hex()
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            os.chmod(folder, 0o700)
            with os.scandir(folder) as entries:
                found = list(entries)
        except OSError:
            continue
        for entry in found:
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)  # a folder that cannot be written cannot be moved
                number += 1
                above = os.path.join(root, f".{mark}-{number}")
                os.rename(entry.path, above)
                folders.append(above)
        if folder != root:
            with suppress(OSError):
                os.rmdir(folder)
    with suppress(OSError):
        os.rmdir(root)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _wake_on(*signals: signal.Signals) -> int:
    """Return a descriptor that becomes readable when one of the signals arrives."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, _seen)
    return read


_terminated = False


def _seen(number: int, _: object) -> None:
    global _terminated
    _terminated = _terminated or number == signal.SIGTERM


def _start(command: list[str]) -> "tuple[int | None, int]":
    """Return the command's process; None, and why, where there is no such program."""
    guard = os.getpid()
    failure_read, failure_write = os.pipe()  # closed by a successful exec
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(127)  # the guard died before the call
            os.execvp(command[0], command)
        except OSError as error:
            os.write(failure_write, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(failure_write)
    failure = os.read(failure_read, 16)
    os.close(failure_read)
    if not failure:
        return child, 0
    os.waitpid(child, 0)
    return None, int(failure)


def _let_go_of_the_wire() -> None:
    """Or the program would not see the end of what the tool server writes."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _report(status: int, line: str) -> None:
    with suppress(OSError):  # nobody may be left to be told
        os.write(status, line.encode() + b"\n")


def _watch(child: int, lifeline: int, wake: int, parent: int) -> "tuple[int | None, bool | None]":
    """Return how the child ended, if it has, and whether an end was asked for: None where nobody has said."""
    while True:
        ready, _, _ = select.select([lifeline, wake], [], [], PARENT_CHECK_INTERVAL_S)
        if wake in ready:
            os.read(wake, 512)
        code = _reaped(child)
        if lifeline in ready:
            return code, bool(os.read(lifeline, 1))
        if os.getppid() != parent:
            return code, False
        if code is not None:
            return code, None
        if _terminated:
            return None, True


def _reaped(child: int) -> "int | None":
    """Reap whoever has died; return how the child ended, if it has."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = os.waitstatus_to_exitcode(status)


def _ask_to_end(child: int, wake: int, grace_s: float, asked: bool) -> int:
    """End the child: the end of its input first, where it was given one, then SIGTERM, then SIGKILL."""
    if asked and (code := _waited(child, wake, grace_s)) is not None:
        return code
    _signal_group(child, signal.SIGTERM)
    if (code := _waited(child, wake, grace_s)) is not None:
        return code
    _signal_group(child, signal.SIGKILL)
    code = _waited(child, wake, KILL_TIMEOUT_S)
    return -signal.SIGKILL if code is None else code


def _waited(child: int, wake: int, seconds: float) -> "int | None":
    deadline = time.monotonic() + seconds
    while (code := _reaped(child)) is None and (left := deadline - time.monotonic()) > 0:
        if select.select([wake], [], [], left)[0]:
            os.read(wake, 512)
    return code


def _signal_group(group: int, number: signal.Signals) -> None:
    # Nobody may be left; macOS reports a group of zombies as forbidden.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _kill_all(child: int) -> None:
    """Kill what the tool server left behind, in its group or out of it, until nothing is there."""
    _signal_group(child, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        _reaped(child)
        left = _descendants()
        if not left:
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)


def _descendants() -> list[int]:
    """Return the living processes below this one; none where the system does not tell."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name of a program may hold anything, brackets too; what is looked for stands behind it.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
