"""One life of a session's interpreter: a process, its descriptors, and the requests that it answers one by one."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from openenv_core.sandbox.answers import Answer, AnswerReader, Forged
from openenv_core.sandbox.capture import Capture
from openenv_core.sandbox.inside.frames import MAX_VALUE, pack_request
from openenv_core.sandbox.inside.interrupts import AGAIN
from openenv_core.sandbox.kernel.cgroups import Cgroup
from openenv_core.sandbox.limits import Limits

RECEIVE_BYTES: Final = 1 << 20

_REMOVALS: Final = 100
_REMOVAL_S: Final = 0.02

AGAIN_S: Final = 0.05
"""Seconds after which an interrupt is repeated: one that comes before the code does reaches nobody."""

EXIT_S: Final = 5.0
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
class Reply:
    """What became of one request.

    Attributes:
        answer: The interpreter's own; None where it ended without.
        stopped: Why the supervisor stopped it: "timeout", "output", "disk", or a broken rule in words.
        exit: How the process ended; None where it lives.
        stdout: What was written, and whether some of it was dropped.
        stderr: Likewise.
        took_s: Seconds.
    """

    answer: Answer | None
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
        self._answered: asyncio.Future[Answer | None] | None = None
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

    async def request(self, message: dict[str, Any], timeout_s: float) -> Reply:
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
            await asyncio.wait([self.exited], timeout=EXIT_S)
        gone = self.exited.result() if self.exited.done() else None if answer is not None else Exit()
        if gone is not None and self.cgroup is not None and self.cgroup.oom_killed():
            gone = replace(gone, memory=True)
        return Reply(
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
        every_s = max(0.001, min(AGAIN_S, self.limits.grace_s / 4))
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
            await asyncio.wait([self.exited], timeout=EXIT_S)
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
        except Forged as error:
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
        time.sleep(_REMOVAL_S)
