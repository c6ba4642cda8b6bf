"""Runs one command and ends it, with what it started, whatever becomes of the program that asked.

    python -I -S guard.py LIFELINE STATUS KEPT GRACE_S FOLDER SCOPE COMMAND...

LIFELINE is the reading end of a pipe. Its end, which the program brings by closing it or by dying, SIGKILL included,
ends the command: SIGTERM to its process group, and after GRACE_S seconds SIGKILL. So does SIGTERM to the guard. Should
the guard itself be killed, the kernel ends the command (on Linux).

With LIFELINE 0 the command has no input. With another one, standard input, output and error are the command's own, and
the guard keeps none of them; a byte on it then says that their end was the first request, which is given GRACE_S too.
KEPT is a descriptor that the command inherits, or -1. SCOPE is `group`, or `all`: then the guard is the subreaper of
what the command starts, and kills what has left its group and its parent, too. What happens is written to STATUS, a
line each: `started PID`, `failed ERRNO`, `ended CODE`; the guard then stays until LIFELINE says more, and where the
program died it removes FOLDER. STATUS is -1, and FOLDER empty, where nobody wants that.

Only the standard library is used, and the file is run by its path, so that it starts in a few milliseconds.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

PARENT_CHECK_INTERVAL_S = 0.5
"""A fork of the program may hold the lifeline open after the program's death, so the parent is looked at too."""

KILL_TIMEOUT_S = 3.0
"""How long the dead may take to be reaped: one in the middle of a disk access takes as long as that does."""
POLL_INTERVAL_S = 0.005

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
PR_SET_CHILD_SUBREAPER = 36


def guard_command(
    command: Sequence[str],
    *,
    grace_s: float,
    lifeline: int = 0,
    status: int = -1,
    kept: int = -1,
    folder: str = "",
    everything: bool = False,
) -> list[str]:
    """Return the command that runs another one under a guard; see above for what the arguments mean."""
    scope = "all" if everything else "group"
    options = [str(lifeline), str(status), str(kept), str(grace_s), folder, scope]
    return [sys.executable, "-I", "-S", __file__, *options, *command]


def main(arguments: list[str]) -> int:
    """Run the command to its end, and return its exit status."""
    lifeline, status, kept = map(int, arguments[:3])
    grace_s, folder, everything = float(arguments[3]), arguments[4], arguments[5] == "all"
    command = arguments[6:]
    for fd in {lifeline, status} - {-1}:
        os.set_inheritable(fd, False)
    parent = os.getppid()
    wake = _open_signal_pipe(signal.SIGCHLD, signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's: the program decides what they end
        signal.signal(number, signal.SIG_IGN)
    if everything:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child, error = _start(command, without_input=lifeline == 0)
    if kept >= 0:
        os.close(kept)
    if child is None:
        _report(status, f"failed {error}")
        sys.stderr.write(f"cannot run {command[0]!r}: {os.strerror(error)}\n")
        return 127
    if lifeline != 0:
        _close_standard_streams()
    _report(status, f"started {child}")
    code, requested = _watch(child, lifeline, wake, parent)
    if code is None:
        term_wait_s = grace_s if requested and lifeline != 0 else 0.0
        code = _end(child, wake, term_wait_s, grace_s)
    _kill_rest(child, everything)
    _report(status, f"ended {code}")
    while requested is None and status >= 0:
        _, requested = _watch(0, lifeline, wake, parent)
    if folder and not requested:
        remove_tree(folder)
    return code if code >= 0 else 128 - code


def remove_tree(root: str) -> None:
    """Remove a folder and all that is in it, as far as this user may.

    A command may leave folders that nobody can look into, and a tree that is deeper than a program has calls or
    descriptors: each folder is moved up to the root before it is looked into.
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


def _start(command: list[str], *, without_input: bool) -> "tuple[int | None, int]":
    """Return the command's process; None, and why, where there is no such program."""
    guard = os.getpid()
    failure_read, failure_write = os.pipe()  # closed by a successful exec
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if without_input:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
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


def _close_standard_streams() -> None:
    """Or the program would not see the end of what the command writes."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _report(status: int, line: str) -> None:
    with suppress(OSError):  # nobody may be left to be told, or want to be
        os.write(status, line.encode() + b"\n")


def _watch(child: int, lifeline: int, wake: int, parent: int) -> "tuple[int | None, bool | None]":
    """Return how the child ended, if it has, and whether an end was asked for: None where nobody has said."""
    while True:
        ready = _wait_readable(PARENT_CHECK_INTERVAL_S, lifeline, wake)
        if wake in ready:
            os.read(wake, 512)
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
    """Wait for one that can be read, or is at its end; return which are. select(2) takes none above 1023."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(timeout_s * 1000)]


def _reap(child: int) -> "int | None":
    """Reap whoever has died; return how the child ended, if it has."""
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


def _end(child: int, wake: int, term_wait_s: float, grace_s: float) -> int:
    """End the command: by the end of its input where it was given one, then by SIGTERM, then by SIGKILL."""
    if term_wait_s and (code := _wait(child, wake, term_wait_s)) is not None:
        return code
    _signal_group(child, signal.SIGTERM)
    if (code := _wait(child, wake, grace_s)) is not None:
        return code
    _signal_group(child, signal.SIGKILL)
    code = _wait(child, wake, KILL_TIMEOUT_S)
    return -signal.SIGKILL if code is None else code


def _wait(child: int, wake: int, seconds: float) -> "int | None":
    deadline = time.monotonic() + seconds
    while (code := _reap(child)) is None and (left := deadline - time.monotonic()) > 0:
        if _wait_readable(left, wake):
            os.read(wake, 512)
    return code


def _signal_group(group: int, number: signal.Signals) -> None:
    # Nobody may be left; macOS reports a group of zombies as forbidden.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _kill_rest(child: int, everything: bool) -> None:
    """Kill what the command left behind in its group and, if asked to, out of it, until nothing is there."""
    _signal_group(child, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while everything and time.monotonic() < deadline:
        _reap(child)
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
    pids: list[int] = []
    queue = [os.getpid()]
    while queue:
        child_pids = children.get(queue.pop(), [])
        pids += child_pids
        queue += child_pids
    return pids


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
