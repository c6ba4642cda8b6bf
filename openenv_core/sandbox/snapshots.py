"""Interpreters whose every execution is a fork of the state before it: state that outlives a kill, and can branch.

`inside/runner.py` is the other side. All branches of a session are one domain of trust, with one set of limits:
they share processes, memory control group and file system with the first.
"""

import asyncio
import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from openenv_core.sandbox.answers import AnswerReader
from openenv_core.sandbox.config import Limits
from openenv_core.sandbox.errors import SandboxUnavailableError
from openenv_core.sandbox.inside.frames import MAX_VALUE, READY, pack_request
from openenv_core.sandbox.worker import (
    EXIT_TIMEOUT_S,
    RECEIVE_BYTES,
    Ends,
    Exit,
    Worker,
    hear,
    make_ends,
    receive,
)

BRANCH_TIMEOUT_S: Final = 20.0


def _future() -> asyncio.Future[Exit]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class BranchFamily:
    """A first interpreter and those that branched from it: the end of the last is the end of all.

    Attributes:
        first: Its root is that of all.
        over: How that root ended.
        members: How many live.
        made: How many there have been.
        running: Those that are asked something.
    """

    first: "BranchingWorker"
    over: asyncio.Future[Exit] = field(default_factory=_future)
    members: int = 1
    made: int = 1
    running: "set[BranchingWorker]" = field(default_factory=set)


class BranchingWorker(Worker):
    """A worker that runs each request in a process of its own, which then takes over."""

    def __init__(self, ends: Ends, limits: Limits, family: BranchFamily | None = None) -> None:
        super().__init__(ends.control, ends.stdout, ends.stderr, limits)
        self.family = family or BranchFamily(self)
        self._head = 0
        self._held: dict[int, int] = {}
        self._branching = False
        self._late = False  # ended because a branch was not there in time
        self._overdue = False  # whoever will run the request is to be killed when it shows itself

    def follow(self, over: asyncio.Future[Exit]) -> None:
        """Take over how the root will have ended. A member of the family may have ended before."""
        self.family.over = over
        over.add_done_callback(self._root_ended)

    def watch_head(self, process: int) -> None:
        """Take over the process once it is confined, by its number."""
        self._head = process
        self._held[process] = os.pidfd_open(process)
        self.watch(self._held[process])

    def _pace(self, number: signal.Signals) -> None:
        """See `Worker._pace`. What the code has forked stands still as soon as no member of the family has its turn."""
        family = self.family
        if number == signal.SIGCONT:
            family.running.add(self)
        else:
            family.running.discard(self)
        if (
            family.first.leader is not None
            and self.alive
            and (number == signal.SIGCONT or not family.running)
        ):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(family.first.leader, number)
        self._signal(self._process, number)

    def own_end(self) -> str | None:
        """See `Worker.own_end`. A branch that was not there in time was ended for that."""
        return None if self._late else super().own_end()

    def stop(self, why: str) -> None:
        """See `Worker.stop`. While it branches no code runs, and there is nothing to interrupt."""
        if not self._branching:
            super().stop(why)

    def kill(self) -> None:
        """End what runs; the state before it goes on. Where nothing runs, end the state."""
        if self._runs() and self._answered is not None:
            self._signal(self._process, signal.SIGKILL)
            self._kill_all_later()
        else:
            self.kill_all()

    def _runs(self) -> bool:
        """Whether a process of its own is known to run the request."""
        return self._process != self._held.get(self._head)

    def _end_request(self) -> None:
        if self._runs():
            self.kill()
        else:
            self._overdue = True
            self._kill_all_later()

    def _kill_all_later(self) -> None:
        if self._kill_later is not None:
            self._kill_later.cancel()
        self._kill_later = self._loop.call_later(EXIT_TIMEOUT_S, self.kill_all)

    def kill_all(self) -> None:
        """End the state too."""
        if self._closed:
            return
        self._kill_held()
        if self.family.members > 1:
            # The root lives on with the others, and does not tell of this one's end.
            self._end(Exit(signal=signal.SIGKILL))
        else:
            Worker.kill(self.family.first)

    async def close(self) -> None:
        """Kill it, and with the last of its family all that they had. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._kill_held()
        self.family.members -= 1
        last = not self.family.members
        if last:
            Worker.kill(self.family.first)
            if not self.family.over.done():
                await asyncio.wait([self.family.over], timeout=EXIT_TIMEOUT_S)
        self._end(Exit(signal=signal.SIGKILL))
        self._leave()
        if last:
            self.family.first.release_root()

    def release(self) -> None:
        """Close the descriptors of one that was never born."""
        self._leave()
        self.release_root()

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
        self.root, self.cgroup = root, cgroup
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
        self.family.over.remove_done_callback(self._root_ended)

    def _kill_held(self) -> None:
        for descriptor in self._held.values():
            self._signal(descriptor, signal.SIGKILL)

    def _orphaned(self) -> None:
        super()._orphaned()
        if not self.exited.done():
            # Nobody is left who could go on with the state.
            self.kill_all()

    def _end(self, exit_: Exit) -> None:
        if not self.exited.done():
            self.exited.set_result(exit_)

    def _root_ended(self, over: asyncio.Future[Exit]) -> None:
        self._end(over.result())

    async def branch(self, folder: str) -> "BranchingWorker":
        """Fork the interpreter as it stands.

        Args:
            folder: Where the branch reads and writes, as the interpreter sees it.

        Raises:
            SandboxUnavailableError: It did not come to life.
        """
        if not self.alive:
            raise SandboxUnavailableError(
                "expected a living interpreter to branch from, got one that has ended"
            )
        ends = make_ends()
        other = BranchingWorker(ends, self.limits, self.family)
        self.family.members += 1
        self.family.made += 1
        self._number += 1
        self._expected = self._number
        self._answered = self._loop.create_future()
        self.exited.add_done_callback(self._ended)
        born = False
        self._branching = True
        try:
            async with asyncio.timeout(BRANCH_TIMEOUT_S):
                self._pace(signal.SIGCONT)
                request = pack_request({"id": self._number, "op": "branch", "folder": folder})
                socket.send_fds(self.control, [request], ends.inner)
                ends.hand_over()
                heard = await hear(ends.control, self.exited, READY)
                if await self._answered is not None and heard is not None:
                    other.watch_head(heard[0])
                    born = True
        except TimeoutError:
            # It may be made yet, and the answer would be taken for the next one's: nothing else can be asked.
            self._late = True
            self.kill_all()
        except OSError:
            pass  # told below
        except BaseException:
            # Whoever asked is gone, and the answer is still to come: nothing else can be asked.
            self.kill_all()
            await other.close()
            raise
        finally:
            self.exited.remove_done_callback(self._ended)
            ends.hand_over()
            self._expected = self._answered = None
            self._branching = False
            self._pace(signal.SIGSTOP)
        if not born:
            await other.close()
            raise SandboxUnavailableError(
                "expected a branch of the interpreter, got none; it may have too many already"
            )
        self.family.over.add_done_callback(other._root_ended)
        return other

    def _make_reader(self) -> AnswerReader:
        return AnswerReader(2 * self.limits.outputs_bytes + MAX_VALUE, announced=True)

    def _receive(self) -> bytes:
        data, process, descriptors = receive(self.control, RECEIVE_BYTES)
        for descriptor in descriptors:
            os.close(descriptor)
        new = None if process in self._held else process
        if new is not None:
            with suppress(ProcessLookupError):
                self._held[new] = os.pidfd_open(new)
        if process in self._held and self._process != self._held[process]:
            self._process = self._held[process]
            if new is not None and self._stopped is not None:
                # The interrupt has reached the head, which runs nothing.
                self._signal(self._process, signal.SIGKILL if self._overdue else signal.SIGINT)
        return data

    async def request(self, message: dict[str, Any], timeout_s: float) -> Any:
        """Ask something; see `Worker.request`. Whoever answered is the head afterwards."""
        self._overdue = False
        reply = await super().request(message, timeout_s)
        for process, descriptor in list(self._held.items()):
            if descriptor == self._process:
                self._head = process
            else:
                del self._held[process]
                os.close(descriptor)
        return reply
