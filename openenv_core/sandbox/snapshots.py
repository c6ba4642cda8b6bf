"""Interpreters whose every execution is a fork of the state before it: state that outlives a kill, and can branch.

`inside/branching.py` is the other side. All branches of a session are one domain of trust, with one set of limits:
they share processes, memory control group and file system with the first.
"""

import asyncio
import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from openenv_core.sandbox.answers import AnswerReader
from openenv_core.sandbox.errors import SandboxUnavailable
from openenv_core.sandbox.inside.frames import MAX_VALUE, READY, pack_request
from openenv_core.sandbox.limits import Limits
from openenv_core.sandbox.wires import Ends, hear, make_ends, receive
from openenv_core.sandbox.worker import EXIT_S, RECEIVE_BYTES, Exit, Worker

BRANCH_S: Final = 20.0


@dataclass(slots=True)
class Family:
    """A first interpreter and those that branched from it: the end of the last is the end of all.

    Attributes:
        first: Its root is that of all.
        members: How many live.
        made: How many there have been.
    """

    first: "BranchingWorker"
    members: int = 1
    made: int = 1


class BranchingWorker(Worker):
    """A worker that runs each request in a process of its own, which then takes over."""

    def __init__(self, ends: Ends, limits: Limits, family: Family | None = None) -> None:
        super().__init__(ends.control, ends.stdout, ends.stderr, limits)
        self.family = family or Family(self)
        self._head = 0
        self._held: dict[int, int] = {}

    def watch_head(self, process: int) -> None:
        """Take over the process once it is confined, by its number."""
        self._head = process
        self._held[process] = os.pidfd_open(process)
        self.watch(self._held[process])

    def kill(self) -> None:
        """End what runs; the state before it goes on. Where nothing runs, end the state."""
        runs = self._process != self._held.get(self._head)
        if runs and self._answered is not None:
            self._signal(self._process, signal.SIGKILL)
            self._kill_later = self._loop.call_later(EXIT_S, self.kill_all)
        else:
            self.kill_all()

    def kill_all(self) -> None:
        """End the state too."""
        for descriptor in self._held.values():
            self._signal(descriptor, signal.SIGKILL)
        if not self.exited.done() and self.family.first is not self:
            self.exited.set_result(Exit(signal=signal.SIGKILL))
        if self.family.members <= 1:
            super().kill()

    async def close(self) -> None:
        """Kill it, and with the last of its family all that they had. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.kill_all()
        self.family.members -= 1
        if self.family.members:
            self._leave()
            return
        first = self.family.first
        Worker.kill(first)
        if not first.exited.done():
            await asyncio.wait([first.exited], timeout=EXIT_S)
        self._leave()
        if first is not self:
            first.release_root()

    def release(self) -> None:
        """Close the descriptors."""
        self._leave()

    def release_root(self) -> None:
        """Close what a family has in common."""
        if self.root is not None:
            os.close(self.root)
            self.root = None
        self.leave_cgroup()

    def _leave(self) -> None:
        root, self.root, self._process = self.root, None, None
        cgroup, self.cgroup = self.cgroup, None
        super().release()
        self.cgroup = cgroup
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
        self.root = root
        if self.family.members == 0 or self.family.first is not self:
            self.release_root()

    async def branch(self, folder: str) -> "BranchingWorker":
        """Fork the interpreter as it stands.

        Args:
            folder: Where the branch reads and writes, as the interpreter sees it.

        Raises:
            SandboxUnavailable: It did not come to life.
        """
        ends = make_ends()
        other = BranchingWorker(ends, self.limits, self.family)
        self.family.members += 1
        self.family.made += 1
        other.root, other.group = None, None
        self._number += 1
        self._expected = self._number
        self._answered = self._loop.create_future()
        try:
            async with asyncio.timeout(BRANCH_S):
                self._pace(signal.SIGCONT)
                request = pack_request({"id": self._number, "op": "branch", "folder": folder})
                socket.send_fds(self.control, [request], ends.inner)
                ends.hand_over()
                heard = await hear(ends.control, self.exited, READY)
                await self._answered
        except (TimeoutError, OSError):
            heard = None
        finally:
            ends.hand_over()
            self._expected = self._answered = None
            self._pace(signal.SIGSTOP)
        if heard is None:
            await other.close()
            raise SandboxUnavailable(
                "expected a branch of the interpreter, got none; it may have too many already"
            )
        other.watch_head(heard[0])
        return other

    def _make_reader(self) -> AnswerReader:
        return AnswerReader(2 * self.limits.outputs_bytes + MAX_VALUE, announced=True)

    def _receive(self) -> bytes:
        data, process, descriptors = receive(self.control, RECEIVE_BYTES)
        for descriptor in descriptors:
            os.close(descriptor)
        if process is not None and process not in self._held:
            with suppress(ProcessLookupError):
                self._held[process] = os.pidfd_open(process)
        if process in self._held and self._process != self._held[process]:
            self._process = self._held[process]
        return data

    async def request(self, message: dict[str, Any], timeout_s: float) -> Any:
        """Ask something; see `Worker.request`. Whoever answered is the head afterwards."""
        reply = await super().request(message, timeout_s)
        for process, descriptor in list(self._held.items()):
            if descriptor == self._process:
                self._head = process
            else:
                del self._held[process]
                os.close(descriptor)
        return reply
