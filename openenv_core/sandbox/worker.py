"""The supervisor's side of a running interpreter: sends its requests, captures its output, enforces timeouts."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from openenv_core.sandbox.answers import (
    ZYGOTE_ENDED,
    Answer,
    AnswerReader,
    Exit,
    ForgedAnswerError,
    finalize_execution,
    truncate_execution,
)
from openenv_core.sandbox.config import Limits
from openenv_core.sandbox.errors import SandboxUnavailableError
from openenv_core.sandbox.inside.agent import FORKED
from openenv_core.sandbox.inside.frames import MAX_VALUE, READY_NOTICE
from openenv_core.sandbox.inside.interpreter import REPEAT_SIGNAL, pack
from openenv_core.sandbox.processes import EXIT_TIMEOUT_S, Connections, InterpreterProcesses, receive_notice
from openenv_core.sandbox.results import EXIT_KILLED, Execution
from openenv_core.sandbox.workspace import Workspace

_CHUNK: Final = 1 << 16
_CHUNKS_PER_READ: Final = 8
"""Chunks to read before returning to the event loop."""

INTERRUPT_REPEAT_INTERVAL_S: Final = 0.05
"""Seconds after which an interrupt is repeated, because one that arrives before the code runs has no effect."""

ORPHAN_TIMEOUT_S: Final = 0.2
"""Seconds within which an interpreter ends, or its zygote's end is reported, after its socket has closed, unless the
machine is busy."""

ORPHAN_POLL_INTERVAL_S: Final = 0.01

BRANCH_TIMEOUT_S: Final = 20.0

IDLE_CHECK_DELAYS_S: Final = (0.01, 0.1, 1.0)
"""Seconds after a pause at which to look whether all processes have stopped."""


class Capture:
    """Captures the output of one pipe.

    Args:
        descriptor: The reading end; closed by `close`.
        keep: Maximum number of bytes to keep per execution.
        wrote: Called with the number of bytes after each read.
    """

    def __init__(self, descriptor: int, keep: int, wrote: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._max_bytes = keep
        self._wrote = wrote
        self._retained = bytearray()
        self._total = 0
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._read, _CHUNKS_PER_READ)

    def take(self) -> tuple[str, bool]:
        """Return the output since the last call, and whether it was truncated."""
        if self._open:
            # All output before the answer is in the pipe by now, and the pipe cannot hold more than this.
            self._read(2 * _CHUNKS_PER_READ + 1)
        text, cut = self._retained.decode("utf-8", "replace"), self._total > len(self._retained)
        self._retained, self._total = bytearray(), 0
        return text, cut

    def close(self) -> None:
        """Stop reading and close the pipe. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)

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
            if (free_bytes := self._max_bytes - len(self._retained)) > 0:
                self._retained += data[:free_bytes]
            self._wrote(len(data))
            if not self._open:
                return


class Worker:
    """A confined interpreter that handles requests one at a time. Between them it is stopped, with all its threads."""

    def __init__(
        self,
        connections: Connections,
        limits: Limits,
        processes: InterpreterProcesses,
        workspace: Workspace,
    ) -> None:
        self.control = connections.control
        self.processes = processes
        self.workspace = workspace
        self._limits = limits
        self._interrupt_interval_s = max(0.001, min(INTERRUPT_REPEAT_INTERVAL_S, limits.grace_s / 4))
        self._loop = asyncio.get_running_loop()
        self._stdout = Capture(connections.stdout, limits.output_bytes, self._on_written)
        self._stderr = Capture(connections.stderr, limits.output_bytes, self._on_written)
        self._reader = AnswerReader(2 * limits.outputs_bytes + MAX_VALUE, announced=processes.forks)
        self._written = 0
        self._number = 0
        self._answered: asyncio.Future[Answer | None] | None = None
        self._end_cause: str | None = None
        self._timers: list[asyncio.TimerHandle] = []  # of the request
        self._branching = False
        self._killed = False
        self._serves = False
        self._closed = False
        self._orphaned = False  # its end of the socket is closed
        self._broken: str | None = None  # what the code did to the interpreter
        self._branch_timed_out = False  # ended because a branch was not there in time
        self._stopped_after: int | None = None  # the tree's request after which it was seen stopped
        self._idle_timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self.control.fileno(), self._on_readable)
        self._pause()

    @property
    def exited(self) -> asyncio.Future[Exit]:
        """Resolves to the interpreter's exit."""
        return self.processes.exited

    @property
    def alive(self) -> bool:
        """Whether it can handle requests."""
        return not self._closed and not self.exited.done()

    def find_end(self) -> tuple[str, bool] | None:
        """Return how the interpreter ended between requests, and whether its code did that; None while it is alive.

        An end is from outside if all code was seen to stand still before: the system-call filter lets no code arrange a
        SIGKILL for later, by a timer for example, which it could pass off as a failure of the sandbox. But a thread can
        run between the answer and the pause, and an exit may be reported late: one that the sandbox has not caused is
        attributed to the code.
        """
        is_outside = self._stopped_after == self.processes.tree.begun and not self.processes.is_stopped()
        if self.alive and not is_outside:
            return None
        if self.exited.done() and self.exited.result().zygote:
            return ZYGOTE_ENDED, False
        if is_outside:
            return "the interpreter was ended from outside while no code ran", False
        if self._branch_timed_out or not self.exited.done():
            return "the interpreter was ended because a branch did not start in time", False
        return self._broken or "the code ended the interpreter after its last execution", True

    async def request(self, message: dict[str, Any], timeout_s: float) -> tuple[Execution, bytes | None]:
        """Send a request and wait for the result, at most for the timeout, the grace period and a kill.

        Returns:
            The execution, without its files and the session's fields; and the text of the answer.
        """
        began = self._loop.time()
        self._end_cause, self._written = None, 0
        with self._open_request() as answered:
            self._schedule(timeout_s, self.stop, "timeout")
            try:
                await self._send(pack({"id": self._number, **message}))
                answer = await answered
            except BaseException:
                # The caller is gone, and what the code has done so far is unknown.
                self.kill()
                raise
        took_s = self._loop.time() - began
        lost = answer is None or self._killed or self.processes.doomed
        if lost and not self.exited.done():
            self.processes.kill_all()
            await asyncio.wait([self.exited], timeout=EXIT_TIMEOUT_S)
        exit_ = self.exited.result() if self.exited.done() else Exit(signal=signal.SIGKILL) if lost else None
        cause = self._end_cause
        if exit_ is not None:
            if exit_.signal == signal.SIGKILL and self.processes.tree.oom_killed():
                exit_ = replace(exit_, memory=True)
            if cause == self._broken and (exit_.signal != signal.SIGKILL or exit_.memory):
                cause = None  # it ended by itself before it was killed
        self.processes.finish()
        execution = truncate_execution(answer, self._stdout.take(), self._stderr.take(), self._limits)
        execution = replace(execution, execution_time_s=took_s)
        rolled_back = exit_ is None and (execution.status, execution.exit_code) == ("killed", EXIT_KILLED)
        if rolled_back and self.processes.tree.oom_killed():
            reason = "it used more memory than its limit; the state before it is kept"
            execution = replace(execution, status="memory", reason=reason)
        text = None if answer is None else answer[1]
        return finalize_execution(execution, cause, exit_, self._limits, timeout_s), text

    async def serve(self, channel: socket.socket | None) -> None:
        """Turn the interpreter into an agent that serves a channel (`inside/agent.py`); return when it has ended.

        It handles no other requests after that.

        Args:
            channel: The agent's end; None for a fork of an agent, which has its own.
        """
        self._serves = True
        with self._open_request() as answered:
            if channel is not None:
                request = pack({"id": self._number, "op": "serve"})
                socket.send_fds(self.control, [request], [channel.fileno()])
            await answered

    async def fork_agent(
        self, channel: socket.socket, contexts: int, request_copy: Callable[[str], Awaitable[Any]]
    ) -> "Worker":
        """Fork a serving agent, with its interpreters.

        Args:
            channel: The copy's end of its channel.
            contexts: Number of interpreters of the agent.
            request_copy: Asks the agent to fork, and to copy its files to a folder; meanwhile it receives the
                descriptors sent here. Raises if the agent refuses.

        Raises:
            SandboxUnavailableError: The copy did not start.
            FileRefusedError: There is no space for a copy of the files.
        """
        owner = self.processes.tree.owner
        try:
            async with AsyncExitStack() as undo:
                workspace = await asyncio.to_thread(partial(self.workspace.branch, fill=False))
                undo.push_async_callback(workspace.close)
                connections = Connections(owner=owner)
                undo.callback(connections.close)
                with ExitStack() as stack:  # with these ends open here, the end of a copy would go unnoticed
                    outer = list[int]()
                    for _ in range(contexts):
                        each = Connections(owner=owner)
                        stack.callback(each.close)
                        control, *pipes = each.inner
                        socket.send_fds(self.control, [b"I"], [*pipes, control, connections.inner[0]])
                        outer += [each.control.fileno(), each.stdout, each.stderr]
                    socket.send_fds(self.control, [b"A"], [*connections.inner, channel.fileno(), *outer])
                connections.close_remote_ends()
                async with asyncio.timeout(BRANCH_TIMEOUT_S):
                    await request_copy(workspace.inside)
                    process, _ = await receive_notice(connections.control, self.exited, FORKED)
                copy = self._make_branch(connections, process, workspace)
                undo.pop_all()
                return copy
        except (TimeoutError, OSError) as error:
            raise SandboxUnavailableError(f"expected a fork of the sandbox, got {error!r}") from None

    async def branch(self, workspaces: Sequence[Workspace]) -> "list[Worker]":
        """Fork the interpreter once for each workspace; return the forks, and close the workspaces without one.

        Args:
            workspaces: Copies of the files; at most `MAX_BRANCHES_PER_REQUEST`.
        """
        connections: list[Connections] = []
        branches: dict[int, Worker] = {}
        self._branching = True
        try:
            if not self.alive:
                raise ProcessLookupError
            connections.extend(Connections(owner=self.processes.tree.owner) for _ in workspaces)
            async with asyncio.timeout(BRANCH_TIMEOUT_S):
                with self._open_request() as answered:
                    folders = [each.inside for each in workspaces]
                    request = pack({"id": self._number, "op": "branch", "folders": folders})
                    descriptors = [fd for each in connections for fd in each.inner]
                    socket.send_fds(self.control, [request], descriptors)
                    for each in connections:
                        each.close_remote_ends()
                    coming = [receive_notice(each.control, self.exited, READY_NOTICE) for each in connections]
                    notices = await asyncio.gather(*coming, return_exceptions=True)
                    if await answered is not None:
                        for number, notice in enumerate(notices):
                            if not isinstance(notice, BaseException):
                                branches[number] = self._make_branch(
                                    connections[number], notice[0], workspaces[number]
                                )
        except TimeoutError:
            # The branch may still be made, and its answer would be taken for the next request's: end the interpreter.
            self._branch_timed_out = True
            self.processes.kill_all()
            await asyncio.wait([self.exited], timeout=EXIT_TIMEOUT_S)
        except OSError:
            pass  # there are fewer branches
        except BaseException:
            # The caller is gone, and the answer is still to come: no other request can follow.
            self.processes.kill_all()
            raise
        finally:
            self._branching = False
            for number, each in enumerate(connections):  # there may have been no descriptors for all
                if number not in branches:
                    each.close()
            unused = [each.close() for number, each in enumerate(workspaces) if number not in branches]
            await asyncio.gather(*unused)
        return list(branches.values())

    def _make_branch(self, connections: Connections, process: int, workspace: Workspace) -> "Worker":
        processes = InterpreterProcesses(self.processes.tree, process, forks=True)
        return Worker(connections, self._limits, processes, workspace)

    def stop(self, reason: str) -> None:
        """Interrupt the running request, and kill it after the grace period; do nothing if none runs."""
        if self._answered is None or self._branching or self._end_cause is not None or self._closed:
            return
        if reason == "timeout" and not self._answered.done():
            # If this process or the zygote is late, the answer may have arrived already, or the code have ended.
            self._on_readable()
            if not self._answered.done() and self.processes.has_ended():
                self._schedule(EXIT_TIMEOUT_S, self._kill_all)
                return
        if self._answered.done() or self._broken is not None:
            return
        self._end_cause = reason
        self.processes.interrupt()
        self._schedule(self._interrupt_interval_s, self._repeat_interrupt)
        self._schedule(self._limits.grace_s, self._on_grace_expired)

    def kill(self) -> None:
        """Kill the running request, falling back to the state before it if a process has it; else the interpreter."""
        if self._answered is not None and self.processes.kill_running():
            self._schedule(EXIT_TIMEOUT_S, self._kill_all)
        else:
            self._kill_all()

    async def close(self) -> None:
        """Kill the interpreter, wait until it is gone, and release its resources and files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        try:
            await self.processes.close()
        finally:  # the event loop may end first, and cancel this
            self._loop.remove_reader(self.control.fileno())
            self.control.close()
            self._stdout.close()
            self._stderr.close()
            await self.workspace.close()

    @contextmanager
    def _open_request(self) -> Iterator["asyncio.Future[Answer | None]"]:
        """Resume the interpreter for one request, and yield a future of its answer; None if it exits first."""
        self._number += 1
        self._answered = answered = self._loop.create_future()
        self.exited.add_done_callback(self._on_exit)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.processes.begin()
        try:
            yield answered
        finally:
            self.exited.remove_done_callback(self._on_exit)
            for timer in self._timers:
                timer.cancel()
            self._timers.clear()
            self._answered = None
            self._pause()

    def _pause(self, check_delays_s: tuple[float, ...] = IDLE_CHECK_DELAYS_S) -> None:
        self.processes.pause()
        if check_delays_s:
            self._idle_timer = self._loop.call_later(check_delays_s[0], self._check_idle, check_delays_s[1:])

    def _check_idle(self, delays_s: tuple[float, ...]) -> None:
        if self.processes.is_stopped() and self.processes.tree.is_still():
            self._stopped_after = self.processes.tree.begun
        else:
            self._pause(delays_s)  # again: an end may have resumed others, see `ProcessTree.is_still`

    async def _send(self, data: bytes) -> None:
        # The interpreter does not read while code runs, and runs code only after reading the whole request.
        with suppress(OSError):  # it has died; its exit says how
            await self._loop.sock_sendall(self.control, data)

    def _on_readable(self) -> None:
        try:
            data = self.control.recv(1) if self._serves else self.processes.receive(self.control)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # Its exit follows, unless the code has merely closed the descriptor.
            self._loop.remove_reader(self.control.fileno())
            if not self._orphaned:
                self._orphaned = True
                self._on_orphaned(self._loop.time())
            return
        # An agent's interpreters share this socket, and must not write to it.
        is_expected = self._answered is not None and not self._serves
        try:
            answer = self._reader.feed(data, self._number if is_expected else None)
        except ForgedAnswerError as error:
            self._loop.remove_reader(self.control.fileno())
            self._end_cause = None
            self._kill_broken(f"the code wrote to the interpreter's own channel: {error}")
            return
        if answer is not None and self._answered is not None and not self._answered.done():
            self._answered.set_result(answer)

    def _on_orphaned(self, since: float) -> None:
        if self.exited.done() or self._closed:
            return
        processes, waited_s = self.processes, self._loop.time() - since
        if not processes.has_ended():
            closed = "the code closed the interpreter's own channel"
            if waited_s > (ORPHAN_TIMEOUT_S if processes.forks else EXIT_TIMEOUT_S):
                self._kill_broken(closed)
                return
            if waited_s > ORPHAN_TIMEOUT_S and self._broken is None:
                # On a busy machine it may still be ending by itself; then its exit does not tell of this signal.
                self._break(closed)
                processes.send_signal(signal.SIGKILL)
        elif waited_s > (ORPHAN_TIMEOUT_S if processes.tree.members > 1 else EXIT_TIMEOUT_S):
            # With other interpreters in its tree its exit is not reported, but the zygote's would be.
            self._kill_broken("the code ended the interpreter")
            return
        self._loop.call_later(ORPHAN_POLL_INTERVAL_S, self._on_orphaned, since)

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._end_cause = self._end_cause or self._broken

    def _kill_broken(self, reason: str) -> None:
        self._break(reason)
        self._kill_all()

    def _kill_all(self) -> None:
        self._killed = True
        self.processes.kill_all()
        if self._answered is not None:  # the exit of a killed process may not be reported
            self._schedule(EXIT_TIMEOUT_S, self._on_exit)

    def _on_grace_expired(self) -> None:
        if self._answered is None or self._closed:
            return
        if not self._answered.done():
            self._on_readable()
        if not self._answered.done() and self._broken is None:
            if self.processes.runs:
                self.kill()
            else:
                self.processes.kill_on_start()
                self._schedule(EXIT_TIMEOUT_S, self._kill_all)

    def _schedule(self, delay_s: float, act: Callable[..., object], *args: object) -> None:
        """Call something later, unless the request has ended by then."""
        self._timers.append(self._loop.call_later(delay_s, act, *args))

    def _repeat_interrupt(self) -> None:
        if self._answered is not None and not self._answered.done():
            self.processes.send_signal(REPEAT_SIGNAL)
        self._schedule(self._interrupt_interval_s, self._repeat_interrupt)

    def _on_exit(self, _: object = None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _on_written(self, count: int) -> None:
        self._written += count
        if self._written > self._limits.output_hard_bytes:
            self.stop("output")
