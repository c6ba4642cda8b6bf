"""The processes behind an interpreter, and what connects them with the supervisor.

One process runs every request; or, in a session that keeps snapshots, each request runs in a fork of the process
before, which takes over when it has answered: `inside/runner.py` is the other side. All branches of a session are one
domain of trust, with one set of limits: they share processes, memory control group and file system with the first.
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
from typing import Any, Final

from openenv_core.sandbox.answers import Exit
from openenv_core.sandbox.kernel.cgroups import Cgroup

RECEIVE_BYTES: Final = 1 << 20

EXIT_TIMEOUT_S: Final = 5.0
"""Seconds that a killed process gets to be gone. It has no say in that, the kernel has."""

_REMOVALS: Final = 100
_REMOVAL_INTERVAL_S: Final = 0.02

_CREDENTIALS: Final = struct.Struct("3i")
_ANCILLARY: Final = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * 4)


class Connections:
    """Both ends of a control socket and of two pipes.

    Attributes:
        control: Ours. What comes from it says which process it came from.
        stdout: Ours, to be read.
        stderr: Likewise.
        inner: Theirs: control, stdout, stderr.
    """

    def __init__(self) -> None:
        pipes: list[int] = []
        with ExitStack() as undo:  # there may be no further descriptor
            self.control, inner = map(undo.enter_context, socket.socketpair())
            for _ in range(2):
                for end in os.pipe2(os.O_CLOEXEC):
                    undo.callback(os.close, end)
                    pipes.append(end)
            undo.pop_all()
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.control.setblocking(False)
        self.stdout, inner_stdout, self.stderr, inner_stderr = pipes
        os.set_blocking(self.stdout, False)
        os.set_blocking(self.stderr, False)
        self.inner = [inner.detach(), inner_stdout, inner_stderr]

    def close_remote_ends(self) -> None:
        """Close the ends that are theirs by now. Idempotent."""
        inner, self.inner = self.inner, []
        for descriptor in inner:
            os.close(descriptor)

    def read_stderr(self) -> str:
        """Return what was written to stderr."""
        try:
            return os.read(self.stderr, 1 << 16).decode("utf-8", "replace").strip()
        except BlockingIOError:
            return ""

    def close(self) -> None:
        """Close all of them. Who has not been heard of yet ends when it finds nobody to tell that it is there."""
        self.close_remote_ends()
        self.control.close()
        os.close(self.stdout)
        os.close(self.stderr)


def receive(control: socket.socket, most: int) -> tuple[bytes, int | None, list[int]]:
    """Return bytes, the process that they came from, and the descriptors that came along.

    The kernel has translated the process's number into one of this process's own name space.
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
) -> tuple[int, list[int]] | None:
    """Wait for a notice of one byte.

    Args:
        control: Where it comes from.
        over: Done when nothing will come any more.
        expected: The notice.

    Returns:
        The process that it came from, and the descriptors that came along; None where it did not come.
    """
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(control.fileno(), set_done, readable)
    try:
        await asyncio.wait([readable, over], return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(control.fileno())
    try:
        # One byte at a time: the notices of two processes must not come as one.
        received, process, descriptors = receive(control, 1)
    except OSError:
        return None
    if received == expected and process is not None:
        return process, descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def set_done(future: asyncio.Future[None]) -> None:
    """Set a future's result, unless it is done."""
    if not future.done():
        future.set_result(None)


class ProcessTree:
    """All that was forked for one session and its branches: the end of its first process is the end of all.

    Args:
        exited: How that process ended, once it has; whoever forked it tells it there.
        cgroup: What bounds all of them; removed with them.

    Attributes:
        root: A descriptor of the first process; None until it is known.
        group: The process group that ends with it, where there is no name space that would see to that.
        leader: Of the process group that is paused, where code may start processes; none of them can leave it.
        members: How many interpreters live in it.
        running: Those that are asked something.
    """

    def __init__(self, exited: asyncio.Future[Exit], cgroup: Cgroup | None) -> None:
        self.exited = exited
        self.root: int | None = None
        self.group: int | None = None
        self.leader: int | None = None
        self.members = 0
        self.running: set[InterpreterProcesses] = set()
        self._cgroup = cgroup

    def oom_killed(self) -> bool:
        """Return whether the kernel killed one of them for memory of all."""
        return self._cgroup is not None and self._cgroup.oom_killed()

    def kill(self) -> None:
        """Kill all of them. The exit is reported later."""
        _send_signal(self.root, signal.SIGKILL)
        if self.group is not None:
            for group in {self.group, self.leader or self.group}:
                _signal_group(group, signal.SIGKILL)
        if self._cgroup is not None:
            self._cgroup.kill()

    async def close(self) -> None:
        """Kill them, wait until they are gone, and close what belongs to them."""
        self.kill()
        if not self.exited.done():
            await asyncio.wait([self.exited], timeout=EXIT_TIMEOUT_S)
        root, self.root, self.group, self.leader = self.root, None, None, None
        if root is not None:
            os.close(root)
        cgroup, self._cgroup = self._cgroup, None
        if cgroup is not None:
            asyncio.get_running_loop().run_in_executor(None, _remove, cgroup)


class InterpreterProcesses:
    """The processes of one interpreter.

    Args:
        tree: Where they live.
        process: The interpreter's number.
        forks: Each request runs in a fork of the process before, which takes over once it has answered; else this one
            runs all.

    Raises:
        ProcessLookupError: It has ended already.
    """

    def __init__(self, tree: ProcessTree, process: int, *, forks: bool) -> None:
        self.tree = tree
        self.forks = forks
        self._held = {process: os.pidfd_open(process)}
        self._head = process  # has the state between requests
        self._current = process
        self._pending_signal: signal.Signals | None = None
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        tree.members += 1
        tree.exited.add_done_callback(self._on_tree_exit)

    def branch(self, process: int) -> "InterpreterProcesses":
        """Return those of a branch that the head has forked."""
        return InterpreterProcesses(self.tree, process, forks=True)

    @property
    def runs(self) -> bool:
        """Whether it is known which process runs the request."""
        return not self.forks or self._current != self._head

    def has_ended(self) -> bool:
        """Return whether the process that runs the request has ended, be it that nobody has told yet how."""
        descriptor = self._held.get(self._current)
        if descriptor is None:
            return True
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        return bool(ended.poll(0))

    def begin(self) -> None:
        """Resume all processes at the start of a request."""
        self._pending_signal = None
        self.tree.running.add(self)
        self._pace(signal.SIGCONT)

    def pause(self) -> None:
        """Nothing runs any more. What the code has forked stands still as soon as nothing in the tree runs."""
        self.tree.running.discard(self)
        self._pace(signal.SIGSTOP)

    def finish(self) -> None:
        """Whoever answered the request has the state from now on."""
        self._head = self._current
        for process in self._held.keys() - {self._head}:
            os.close(self._held.pop(process))

    def receive(self, control: socket.socket) -> bytes:
        """Return bytes that came, and find out by them which process runs the request."""
        if not self.forks:
            return control.recv(RECEIVE_BYTES)
        data, process, descriptors = receive(control, RECEIVE_BYTES)
        for descriptor in descriptors:
            os.close(descriptor)
        new = process is not None and process not in self._held
        if process is not None and new:
            with suppress(ProcessLookupError):
                self._held[process] = os.pidfd_open(process)
        if process in self._held and process != self._current:
            self._current = process
            if new and self._pending_signal is not None:
                # The interrupt has reached the head, which runs nothing.
                self.send_signal(self._pending_signal)
        return data

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process that runs the request."""
        _send_signal(self._held.get(self._current), number)

    def interrupt(self) -> None:
        """Interrupt the request."""
        self._pending_signal = signal.SIGINT
        self.send_signal(signal.SIGINT)

    def kill_on_start(self) -> None:
        """Kill whoever will run the request, when it shows itself."""
        self._pending_signal = signal.SIGKILL

    def kill_running(self) -> bool:
        """Kill what runs the request, where the state before it is another process's; else return False."""
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
            # The tree lives on with the others, and does not tell of this one's end.
            self._end(Exit(signal=signal.SIGKILL))
        else:
            self.tree.kill()

    async def close(self) -> None:
        """Kill them, and with the last interpreter the whole tree; wait until they are gone."""
        self._kill_held()
        self.tree.members -= 1
        if not self.tree.members:
            await self.tree.close()
        self._end(self.tree.exited.result() if self.tree.exited.done() else Exit(signal=signal.SIGKILL))
        self.tree.exited.remove_done_callback(self._on_tree_exit)
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _pace(self, number: signal.Signals) -> None:
        tree = self.tree
        concerned = number == signal.SIGCONT or not tree.running
        if concerned and tree.leader is not None and not tree.exited.done():
            _signal_group(tree.leader, number)
        self.send_signal(number)

    def _kill_held(self) -> None:
        for descriptor in self._held.values():
            _send_signal(descriptor, signal.SIGKILL)

    def _end(self, exit_: Exit) -> None:
        if not self.exited.done():
            self.exited.set_result(exit_)

    def _on_tree_exit(self, exited: asyncio.Future[Exit]) -> None:
        self._end(exited.result())


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
