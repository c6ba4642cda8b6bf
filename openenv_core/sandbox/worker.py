"""One life of a session's interpreter: a process, its output, and the requests that it answers one by one."""

import array
import asyncio
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from openenv_core.sandbox.answers import AnswerReader, ForgedAnswerError, InterpreterAnswer
from openenv_core.sandbox.config import Limits
from openenv_core.sandbox.inside.frames import MAX_VALUE, pack_request
from openenv_core.sandbox.inside.runner import AGAIN
from openenv_core.sandbox.kernel.cgroups import Cgroup

_CHUNK: Final = 1 << 16
_TURNS: Final = 8
"""Chunks that are read before others have their turn."""


class Capture:
    """One pipe.

    Args:
        descriptor: Its reading end; closed by `close`.
        keep: Bytes of one execution that are kept.
        wrote: Called with the number of bytes whenever some came.
    """

    def __init__(self, descriptor: int, keep: int, wrote: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._keep = keep
        self._wrote = wrote
        self._kept = bytearray()
        self._total = 0
        self._open = True
        os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._readable)

    def take(self) -> tuple[str, bool]:
        """Return what was kept since the last time, and whether it is less than what was written."""
        if self._open:
            # What was written before the answer is in the pipe, and the pipe holds no more than this.
            self._read(2 * _TURNS + 1)
        text, cut = self._kept.decode("utf-8", "replace"), self._total > len(self._kept)
        self._kept, self._total = bytearray(), 0
        return text, cut

    def close(self) -> None:
        """Read no more. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)

    def _readable(self) -> None:
        self._read(_TURNS)

    def _read(self, turns: int) -> None:
        for _ in range(turns):
            try:
                data = os.read(self._descriptor, _CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            self._total += len(data)
            if (room := self._keep - len(self._kept)) > 0:
                self._kept += data[:room]
            self._wrote(len(data))
            if not self._open:
                return


RECEIVE_BYTES: Final = 1 << 20

_REMOVALS: Final = 100
_REMOVAL_INTERVAL_S: Final = 0.02

INTERRUPT_REPEAT_INTERVAL_S: Final = 0.05
"""Seconds after which an interrupt is repeated: one that comes before the code does reaches nobody."""

EXIT_TIMEOUT_S: Final = 5.0
"""Seconds that a killed process gets to be gone. It has no say in that, the kernel has."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How the process ended.

    Attributes:
        code: What it exited with, where it did.
        signal: The signal that ended it, where one did.
        zygote: The zygote is gone, and took it along.
        memory: The kernel ended it because its control group was out of memory.
    """

    code: int = 0
    signal: int | None = None
    zygote: bool = False
    memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReply:
    """What became of one request.

    Attributes:
        answer: The interpreter's own; None where it ended without.
        stopped: Why the supervisor stopped it: "timeout", "output", "disk", or a broken rule in words.
        exit: How the process ended; None where it lives.
        stdout: What was written, and whether some of it was dropped.
        stderr: Likewise.
        took_s: Seconds.
    """

    answer: InterpreterAnswer | None
    stopped: str | None
    exit: Exit | None
    stdout: tuple[str, bool]
    stderr: tuple[str, bool]
    took_s: float


class Worker:
    """A process that was confined and waits for requests.

    Between requests the process is stopped, all its threads with it.

    Args:
        control: The supervisor's end of the control socket.
        stdout: The reading end of the pipe behind descriptor 1.
        stderr: Likewise, 2.
        limits: Of the session.

    Attributes:
        root: A descriptor of the process whose end is the end of all: the interpreter's own, or the first one of its
            name space.
        group: The process group that ends with it, where there is no name space that would see to that.
        leader: Of the process group that is paused, where code may start processes; none of them can leave it.
        cgroup: The control group that bounds it and what it starts.
        exited: How it ended.
    """

    def __init__(self, control: socket.socket, stdout: int, stderr: int, limits: Limits) -> None:
        self.limits = limits
        self.control = control
        self.root: int | None = None
        self.group: int | None = None
        self.leader: int | None = None
        self.cgroup: Cgroup | None = None
        self._loop = asyncio.get_running_loop()
        self._stdout = Capture(stdout, limits.output_bytes, self._wrote)
        self._stderr = Capture(stderr, limits.output_bytes, self._wrote)
        self._reader = self._make_reader()
        self._written = 0
        self._number = 0
        self._expected: int | None = None
        self._answered: asyncio.Future[InterpreterAnswer | None] | None = None
        self._stopped: str | None = None
        self._again_later: asyncio.TimerHandle | None = None
        self._kill_later: asyncio.TimerHandle | None = None
        self._process: int | None = None
        self.exited: asyncio.Future[Exit] = self._loop.create_future()
        self._closed = False
        self._killed = False
        self._broken: str | None = None

    def watch(self, process: int) -> None:
        """Take over the process once it is confined.

        Args:
            process: A descriptor of the interpreter's process; interrupts and pauses go there.
        """
        self._process = process
        self._loop.add_reader(self.control.fileno(), self._readable)
        self._pace(signal.SIGSTOP)

    def follow(self, over: asyncio.Future[Exit]) -> None:
        """Take over how the process will have ended.

        Args:
            over: Whoever forked it tells it there.
        """
        self.exited = over

    @property
    def alive(self) -> bool:
        """Whether it can be asked something."""
        return not self._closed and not self.exited.done()

    def own_end(self) -> str | None:
        """Return in words how the code has ended it although nothing ran any more; None: the zygote has, or it lives.

        A thread has a moment between the answer and the pause, and its end may be heard of late. What nobody here has
        done, somebody else's SIGKILL included, is the code's: else it could pass for a failure of ours.
        """
        if not self.exited.done() or self.exited.result().zygote:
            return None
        return self._broken or "the code ended the interpreter after its last execution"

    async def request(self, message: dict[str, Any], timeout_s: float) -> WorkerReply:
        """Ask something and wait for what becomes of it; never longer than the time, the grace, and a kill."""
        began = self._loop.time()
        self._number += 1
        self._expected, self._stopped, self._written = self._number, None, 0
        self._answered = answered = self._loop.create_future()
        self.exited.add_done_callback(self._ended)
        timer = self._loop.call_later(timeout_s, self.stop, "timeout")
        try:
            self._pace(signal.SIGCONT)
            await self._send(pack_request({"id": self._number, **message}))
            answer = await answered
        except BaseException:
            # Whoever asked is gone, and what the code has done so far is unknown.
            self.kill()
            raise
        finally:
            timer.cancel()
            for later in (self._again_later, self._kill_later):
                if later is not None:
                    later.cancel()
            self._again_later = self._kill_later = None
            self.exited.remove_done_callback(self._ended)
            self._expected = self._answered = None
            self._pace(signal.SIGSTOP)
        took = self._loop.time() - began
        if (answer is None or self._killed) and not self.exited.done():
            self.kill()
            await asyncio.wait([self.exited], timeout=EXIT_TIMEOUT_S)
        gone = self.exited.result() if self.exited.done() else None if answer is not None else Exit()
        if gone is not None and self.cgroup is not None and self.cgroup.oom_killed():
            gone = replace(gone, memory=True)
        return WorkerReply(
            answer=answer,
            stopped=self._stopped,
            exit=gone,
            stdout=self._stdout.take(),
            stderr=self._stderr.take(),
            took_s=took,
        )

    def stop(self, why: str) -> None:
        """Interrupt what runs, and kill it if that does not help within the grace."""
        if self._answered is None or self._stopped is not None or self._closed:
            return
        if why == "timeout" and not self._answered.done():
            # Where the loop was late the answer is there, and was not read yet.
            self._readable()
        if self._answered.done() or self._broken is not None:
            return
        self._stopped = why
        self._signal(self._process, signal.SIGINT)
        self._repeat_later()
        self._kill_later = self._loop.call_later(self.limits.grace_s, self._lose_patience)

    def _repeat_later(self) -> None:
        every_s = max(0.001, min(INTERRUPT_REPEAT_INTERVAL_S, self.limits.grace_s / 4))
        self._again_later = self._loop.call_later(every_s, self._repeat)

    def _repeat(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._signal(self._process, AGAIN)
            self._repeat_later()

    def kill(self) -> None:
        """End the process and all that it started. Its exit is told later."""
        self._killed = True
        self._signal(self.root, signal.SIGKILL)
        if self.group is not None:
            for group in {self.group, self.leader or self.group}:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
        if self.cgroup is not None:
            self.cgroup.kill()

    async def close(self) -> None:
        """Kill it, wait until it is gone, and close what belongs to it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        if self.root is None:
            # Not yet known by a descriptor: it ends when it finds nobody to tell that it is there.
            with suppress(OSError):
                self.control.shutdown(socket.SHUT_RDWR)
        if not self.exited.done():
            await asyncio.wait([self.exited], timeout=EXIT_TIMEOUT_S)
        self.release()

    def release(self) -> None:
        """Close the descriptors."""
        self._closed = True
        self._loop.remove_reader(self.control.fileno())
        self.control.close()
        self._stdout.close()
        self._stderr.close()
        for descriptor in (self._process, self.root):
            if descriptor is not None:
                os.close(descriptor)
        self._process = self.root = None
        self.leave_cgroup()

    def leave_cgroup(self) -> None:
        """Remove the control group, once the last process in it is buried."""
        cgroup, self.cgroup = self.cgroup, None
        if cgroup is not None:
            self._loop.run_in_executor(None, _remove, cgroup)

    def words(self) -> str:
        """Return what it said on stderr."""
        return self._stderr.take()[0].strip()

    async def _send(self, data: bytes) -> None:
        # It reads nothing while code runs, and code runs only once all of it was read.
        sending: Callable[[socket.socket, bytes], Any] = self._loop.sock_sendall
        try:
            sent = self.control.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it is dead; its exit says how
        if sent < len(data):
            with suppress(OSError):
                await sending(self.control, data[sent:])

    def _readable(self) -> None:
        try:
            data = self._receive()
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # Its exit follows, unless the code has only closed the descriptor.
            self._loop.remove_reader(self.control.fileno())
            self._loop.call_later(0.2, self._orphaned)
            return
        try:
            answer = self._reader.feed(data, self._expected)
        except ForgedAnswerError as error:
            self._stopped = self._broken = f"the code wrote to the interpreter's own channel: {error}"
            self.kill()
            self._loop.remove_reader(self.control.fileno())
            return
        if answer is not None and self._answered is not None and not self._answered.done():
            self._answered.set_result(answer)

    def _make_reader(self) -> AnswerReader:
        return AnswerReader(2 * self.limits.outputs_bytes + MAX_VALUE)

    def _receive(self) -> bytes:
        return self.control.recv(RECEIVE_BYTES)

    def _orphaned(self) -> None:
        if not self.exited.done() and not self._closed:
            self._broken = "the code closed the interpreter's own channel"
            self._stopped = self._stopped or self._broken
            self.kill()

    def _lose_patience(self) -> None:
        if self._answered is None or self._closed:
            return
        if not self._answered.done():
            self._readable()
        if not self._answered.done() and self._broken is None:
            self._end_request()

    def _end_request(self) -> None:
        self.kill()

    def _ended(self, _: asyncio.Future[Exit]) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _wrote(self, count: int) -> None:
        self._written += count
        if self._written > self.limits.output_hard_bytes:
            self.stop("output")

    def _pace(self, number: signal.Signals) -> None:
        """Pause the interpreter, or let it go on, with what it has started."""
        if self.leader is not None and self.alive:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.leader, number)
        self._signal(self._process, number)

    def _signal(self, descriptor: int | None, number: signal.Signals) -> None:
        if descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)


def _remove(cgroup: Cgroup) -> None:
    for _ in range(_REMOVALS):
        if cgroup.remove():
            return
        time.sleep(_REMOVAL_INTERVAL_S)


_CREDENTIALS: Final = struct.Struct("3i")
_ANCILLARY: Final = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * 4)


@dataclass(slots=True)
class Ends:
    """Both ends of a control socket and of two pipes.

    Attributes:
        control: Ours. What comes from it says which process it came from.
        stdout: Ours, to be read.
        stderr: Likewise.
        inner: Theirs: control, stdout, stderr.
    """

    control: socket.socket
    stdout: int
    stderr: int
    inner: list[int]

    def hand_over(self) -> None:
        """Close those that are theirs by now."""
        inner, self.inner = self.inner, []
        for descriptor in inner:
            os.close(descriptor)


def make_ends() -> Ends:
    """Make a set of connections."""
    control, inner = socket.socketpair()
    control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    control.setblocking(False)
    stdout, inner_stdout = os.pipe2(os.O_CLOEXEC)
    stderr, inner_stderr = os.pipe2(os.O_CLOEXEC)
    return Ends(control, stdout, stderr, [inner.detach(), inner_stdout, inner_stderr])


def receive(control: socket.socket, most: int) -> tuple[bytes, int | None, list[int]]:
    """Return bytes, the process that they came from, and the descriptors that came along.

    The kernel has translated the process's number into one of this process's own name space.

    Raises:
        OSError: There are none, or the connection is broken.
    """
    data, ancillary, _, _ = control.recvmsg(most, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    process, descriptors = None, array.array("i")
    for _, kind, content in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content)
        elif kind == socket.SCM_CREDENTIALS:
            process = _CREDENTIALS.unpack(content)[0]
    return data, process or None, list(descriptors)


async def hear(
    control: socket.socket, over: asyncio.Future[Any], expected: bytes
) -> tuple[int, list[int]] | None:
    """Wait for one word.

    Args:
        control: Where it comes from.
        over: Done when nothing will come any more.
        expected: The word.

    Returns:
        The process that said it, and the descriptors that came along; None where it did not come.
    """
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(control.fileno(), _set, readable)
    waiting: Iterable[asyncio.Future[Any]] = (readable, over)
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(control.fileno())
    try:
        # One byte at a time: the words of two processes must not come as one.
        word, process, descriptors = receive(control, 1)
    except OSError:
        return None
    if word == expected and process is not None:
        return process, descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
