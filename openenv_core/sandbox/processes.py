"""The processes of an interpreter, and their connections to the supervisor.

Usually one process runs every request. In a session with snapshots each request runs in a fork of the previous
process, which takes over once it has answered; `inside/runner.py` is the other side. All branches of a session are one
trust domain with one set of limits: they share the process tree, memory control group and file system of the first
interpreter.
"""

import array
import asyncio
import os
import select
import signal
import socket
import struct
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from openenv_core.sandbox.answers import Exit
from openenv_core.sandbox.inside.frames import RESUME, STOP
from openenv_core.sandbox.kernel.cgroups import Cgroup

RECEIVE_BYTES: Final = 1 << 20

EXIT_TIMEOUT_S: Final = 5.0
"""Seconds to wait for a killed process to exit. Only the kernel can delay that."""

_REMOVALS: Final = 100
_REMOVAL_INTERVAL_S: Final = 0.02

_CREDENTIALS: Final = struct.Struct("3i")
_ANCILLARY: Final = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * 4)


class Connections:
    """Both ends of an interpreter's control socket and of its output pipes.

    Args:
        paced: Whether to open a socket for `ProcessTree.pacer`.
        owner: User and group of the interpreter, if they are not this process's: it may open its streams again, as
            /dev/stdout for example.

    Attributes:
        control: The supervisor's end of the control socket. Messages carry their sender's process id.
        stdout: The reading end of the pipe.
        stderr: The reading end of the pipe.
        pacer: The supervisor's end of that socket, if there is one.
        inner: The other ends: control, stdout, stderr, pacer.
    """

    def __init__(self, *, paced: bool = False, owner: tuple[int, int] | None = None) -> None:
        pipes: list[int] = []
        self.pacer: socket.socket | None = None
        with ExitStack() as undo:  # the process may run out of descriptors
            self.control, inner = map(undo.enter_context, socket.socketpair())
            sockets = [inner]
            if paced:
                self.pacer, inner = map(undo.enter_context, socket.socketpair())
                self.pacer.setblocking(False)
                sockets.append(inner)
            for _ in range(2):
                for end in os.pipe2(os.O_CLOEXEC):
                    undo.callback(os.close, end)
                    if owner is not None:
                        os.fchown(end, *owner)
                    pipes.append(end)
            undo.pop_all()
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.control.setblocking(False)
        self.stdout, inner_stdout, self.stderr, inner_stderr = pipes
        os.set_blocking(self.stdout, False)
        os.set_blocking(self.stderr, False)
        control, *pacer = [each.detach() for each in sockets]
        self.inner = [control, inner_stdout, inner_stderr, *pacer]

    def close_remote_ends(self) -> None:
        """Close the interpreter's ends, which it has received by now. Idempotent."""
        inner, self.inner = self.inner, []
        for descriptor in inner:
            os.close(descriptor)

    def read_stderr(self) -> str:
        """Return the text written to stderr."""
        try:
            return os.read(self.stderr, 1 << 16).decode("utf-8", "replace").strip()
        except BlockingIOError:
            return ""

    def close(self) -> None:
        """Close all ends. An interpreter that has not reported yet exits when it tries to."""
        self.close_remote_ends()
        self.control.close()
        if self.pacer is not None:
            self.pacer.close()
        os.close(self.stdout)
        os.close(self.stderr)


def receive(control: socket.socket, most: int) -> tuple[bytes, int | None, list[int]]:
    """Return received bytes, the id of the process that sent them, and the descriptors sent along.

    The kernel translates the process id into this process's own pid namespace.
    """
    data, ancillary, _, _ = control.recvmsg(most, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    process, descriptors = None, array.array("i")
    for _, kind, content in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content)
        elif kind == socket.SCM_CREDENTIALS:
            process = _CREDENTIALS.unpack(content)[0]
    return data, process or None, list(descriptors)


async def receive_notice(
    control: socket.socket, over: asyncio.Future[Any], expected: bytes
) -> tuple[int, list[int]]:
    """Wait for a one-byte notice; return the id of the process that sent it, and the descriptors sent along.

    Args:
        control: The socket to receive it from.
        over: A future that is done once no notice can arrive any more.
        expected: The notice.

    Raises:
        ProcessLookupError: It did not arrive.
    """
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(control.fileno(), readable.cancel)  # ends the wait, however often it is called
    try:
        await asyncio.wait([readable, over], return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(control.fileno())
    received, descriptors = b"", list[int]()
    with suppress(OSError):
        # One byte only: notices of two processes must not be read together.
        received, process, descriptors = receive(control, 1)
        if received == expected and process is not None:
            return process, descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    raise ProcessLookupError("it ended at once")


@dataclass(eq=False)
class ProcessTree:
    """All processes forked for one session and its branches; they end with the first of them.

    Attributes:
        exited: Resolves to the first process's exit; set by the zygote that forked it.
        cgroup: The control group of all processes, if any; removed with them.
        owner: User and group of the processes, as of `Connections`.
        pacer: The socket to the session's init process, which pauses all processes, if they can leave the group.
        root: A pidfd of the first process; None until it is known.
        first: Its process id; None if the code can make processes that do not descend from it.
        waits: Whether it only waits for the interpreter, and never stops.
        group: The process group to kill with it, if no pid namespace does that.
        leader: The leader of the process group to pause, if code may start processes that cannot leave the group.
        members: The number of live interpreters in the tree.
        running: The interpreters with a request in progress.
        begun: The number of requests so far. Each resumes all processes, those of other interpreters too.
    """

    exited: asyncio.Future[Exit]
    cgroup: Cgroup | None
    owner: tuple[int, int] | None
    pacer: socket.socket | None
    root: int | None = None
    first: int | None = None
    waits: bool = False
    group: int | None = None
    leader: int | None = None
    members: int = 0
    running: "set[InterpreterProcesses]" = field(default_factory=set)
    begun: int = 0
    _oom_kills: int = 0
    _unconfirmed: int = 0
    _still_after: int | None = None  # the request after which `is_still` was true

    def pace(self, number: signal.Signals) -> None:
        """Stop or resume all processes that code may have started."""
        if self.pacer is not None:
            self.is_paced()  # reads what is confirmed, or the init process could not write
            with suppress(OSError):  # it is ending
                self._unconfirmed += self.pacer.send(RESUME if number == signal.SIGCONT else STOP)
        elif self.leader is not None and not self.exited.done():
            _signal_group(self.leader, number)

    def is_paced(self) -> bool:
        """Return whether all processes have been sent what `pace` was last called with."""
        if self.pacer is not None:
            with suppress(OSError):
                self._unconfirmed -= len(self.pacer.recv(RECEIVE_BYTES))
        return not self._unconfirmed

    def is_still(self) -> bool:
        """Return whether nothing that code has started can have any effect before the next request resumes it.

        A process in the middle of a long system call, or of its end, stops only afterwards, and may until then end
        others or resume them: by using up memory, or because a group with stopped processes loses its last tie.
        """
        if self._still_after != self.begun and not self.running and self.is_paced():
            threads = self._stopped_threads()
            # Again: a process that ended meanwhile may have handed its children over to one that was read before.
            if threads and threads == self._stopped_threads():
                self._still_after = self.begun
        return self._still_after == self.begun

    def _stopped_threads(self) -> set[str] | None:
        """Return all threads of the code; None if one of them is not stopped, or they are not known."""
        found, pending = set[str](), [str(self.first)]
        try:
            while pending:
                process = pending.pop()
                for thread in os.listdir(f"/proc/{process}/task"):
                    path = Path("/proc", process, "task", thread)
                    is_ours = self.waits and process == str(self.first)
                    if not is_ours and _state(path) not in "TZX":
                        return None
                    found.add(thread)
                    pending += (path / "children").read_text().split()
        except OSError:
            return None
        return found

    def oom_killed(self) -> bool:
        """Return whether the kernel killed a process because of the tree's memory limit, since the last call."""
        before = self._oom_kills
        if self.cgroup is not None:
            self._oom_kills = self.cgroup.count_oom_kills()
        return self._oom_kills > before

    def kill(self) -> None:
        """Kill all processes. `exited` is set later."""
        _send_signal(self.root, signal.SIGKILL)
        if self.group is not None:
            for group in {self.group, self.leader or self.group}:
                _signal_group(group, signal.SIGKILL)
        if self.cgroup is not None:
            self.cgroup.kill()

    async def close(self) -> None:
        """Kill all processes, wait until they are gone, and release the tree's resources."""
        self.kill()
        try:
            if not self.exited.done():
                await asyncio.wait([self.exited], timeout=EXIT_TIMEOUT_S)
        finally:
            if self.root is not None:
                os.close(self.root)
            self.root = self.group = self.leader = None
            if self.pacer is not None:
                self.pacer.close()
            cgroup, self.cgroup = self.cgroup, None
            if cgroup is not None:
                asyncio.get_running_loop().run_in_executor(None, _remove, cgroup)


class InterpreterProcesses:
    """The processes of one interpreter.

    Args:
        tree: The session's process tree.
        process: The interpreter's process id.
        forks: Whether each request runs in a fork of the previous process, which takes over once it has answered;
            otherwise one process runs all requests.

    Raises:
        ProcessLookupError: The process has already ended.
    """

    def __init__(self, tree: ProcessTree, process: int, *, forks: bool) -> None:
        self.tree = tree
        self.forks = forks
        self._held = {process: os.pidfd_open(process)}
        self._head = process  # has the state between requests
        self._current = process
        self._killed: int | None = None
        self._pending_signal: signal.Signals | None = None
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        tree.members += 1
        tree.exited.add_done_callback(self._on_tree_exit)

    @property
    def runs(self) -> bool:
        """Whether the process that runs the request is known."""
        return not self.forks or self._current != self._head

    @property
    def doomed(self) -> bool:
        """Whether the process that runs the request, or has answered it, was sent SIGKILL."""
        return self._current == self._killed

    def has_ended(self) -> bool:
        """Return whether the process that runs the request has ended, even if its exit is not reported yet."""
        descriptor = self._held.get(self._current)
        if descriptor is None:
            return True
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(0))

    def is_stopped(self) -> bool:
        """Return whether the interpreter is alive and stopped, as between requests: it is not ending either."""
        if self.tree.running or not self.tree.is_paced() or self.has_ended():
            return False
        try:
            return _state(Path("/proc", str(self._current))) == "T"
        except OSError:
            return False

    def begin(self) -> None:
        """Resume all processes at the start of a request."""
        self._pending_signal = None
        self.tree.begun += 1
        self.tree.running.add(self)
        self.tree.pace(signal.SIGCONT)
        self.send_signal(signal.SIGCONT)

    def pause(self) -> None:
        """Pause the interpreter after a request. Processes of the code stop once no interpreter of the tree runs."""
        self.tree.running.discard(self)
        if not self.tree.running:
            self.tree.pace(signal.SIGSTOP)
        self.send_signal(signal.SIGSTOP)

    def finish(self) -> None:
        """Make the process that answered the request the head, which has the state."""
        self._head = self._current
        for process in self._held.keys() - {self._head}:
            os.close(self._held.pop(process))

    def receive(self, control: socket.socket) -> bytes:
        """Return received bytes, and learn from their sender which process runs the request."""
        if not self.forks:
            return control.recv(RECEIVE_BYTES)
        data, process, descriptors = receive(control, RECEIVE_BYTES)
        for descriptor in descriptors:
            os.close(descriptor)
        # The first one that announces itself: code may fork others, which must not cost a descriptor each.
        is_new = process not in self._held and not self.runs
        if process is not None and is_new:
            with suppress(ProcessLookupError):
                self._held[process] = os.pidfd_open(process)
        if process in self._held and process != self._current:
            self._current = process
            if is_new and self._pending_signal is not None:
                # The signal went to the head, which does not run the request.
                self.send_signal(self._pending_signal)
        return data

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process that runs the request."""
        if number == signal.SIGKILL:
            self._killed = self._current
        _send_signal(self._held.get(self._current), number)

    def interrupt(self) -> None:
        """Interrupt the request."""
        self._pending_signal = signal.SIGINT
        self.send_signal(signal.SIGINT)

    def kill_on_start(self) -> None:
        """Kill the process that will run the request as soon as it announces itself."""
        self._pending_signal = signal.SIGKILL

    def kill_running(self) -> bool:
        """Kill the process that runs the request if another one has the state before it; else return False."""
        if not self.forks or not self.runs:
            return False
        self.send_signal(signal.SIGKILL)
        return True

    def kill_all(self) -> None:
        """End the interpreter, and with the last one the whole tree."""
        if not self._held:
            return
        self._kill_held()
        if self.tree.members > 1:
            # The tree stays alive with its other interpreters, and does not report this one's exit.
            self._end(Exit(signal=signal.SIGKILL))
        else:
            self.tree.kill()

    async def close(self) -> None:
        """End the interpreter, and with the last one the whole tree; wait until that is gone."""
        self._kill_held()
        self.tree.members -= 1
        try:
            if not self.tree.members:
                await self.tree.close()
        finally:
            self._end(self.tree.exited.result() if self.tree.exited.done() else Exit(signal=signal.SIGKILL))
            self.tree.exited.remove_done_callback(self._on_tree_exit)
            for descriptor in self._held.values():
                os.close(descriptor)
            self._held.clear()

    def _kill_held(self) -> None:
        for descriptor in self._held.values():
            _send_signal(descriptor, signal.SIGKILL)

    def _end(self, exit_: Exit) -> None:
        if not self.exited.done():
            self.exited.set_result(exit_)

    def _on_tree_exit(self, exited: asyncio.Future[Exit]) -> None:
        self._end(exited.result())


def _state(folder: Path) -> str:
    """Return the letter of a process's or thread's state, from its folder in /proc."""
    return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]


def _send_signal(descriptor: int | None, number: signal.Signals) -> None:
    if descriptor is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _remove(cgroup: Cgroup) -> None:
    for _ in range(_REMOVALS):
        if cgroup.remove():
            return
        time.sleep(_REMOVAL_INTERVAL_S)
