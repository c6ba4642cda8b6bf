"""The sandbox: owns a zygote and the sessions forked from it."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self
from uuid import uuid4

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox.answers import Exit, finalize_execution
from openenv_core.sandbox.config import LADDER, Isolation, Limits, SandboxConfig
from openenv_core.sandbox.errors import FileRefusedError, SandboxClosedError, SandboxUnavailableError
from openenv_core.sandbox.inside.frames import MAX_BRANCHES_PER_REQUEST, MAX_VALUE
from openenv_core.sandbox.kernel import cgroups
from openenv_core.sandbox.kernel.cgroups import CgroupMaker
from openenv_core.sandbox.kernel.identity import UserLeases, session_uid
from openenv_core.sandbox.probes import prove
from openenv_core.sandbox.readable import find_readable, without_hidden
from openenv_core.sandbox.results import EXIT_KILLED, EXIT_SANDBOX, Execution, FileInfo, FunctionCall
from openenv_core.sandbox.values import NotPlainError, encode, loads
from openenv_core.sandbox.worker import Worker
from openenv_core.sandbox.workspace import Scratch, Workspace, watch_disk
from openenv_core.sandbox.zygote import Zygote

logger = logging.getLogger("openenv_core.sandbox")

_BACKOFF_S: Final = (0.0, 0.1, 0.5, 2.0, 10.0)
"""Seconds before a zygote that died is replaced, by the number of deaths in a row."""

_HEALTHY_UPTIME_S: Final = 60.0
"""A zygote that lived this long resets the number of deaths."""


class Sandbox:
    """Interpreters for untrusted code.

    Example:
        async with Sandbox(SandboxConfig(preload=("numpy",))) as sandbox:
            session = await sandbox.open()
            done = await session.execute("1 + 1")
            assert done.result == "2"

    The sandbox and its sessions belong to the event loop that it was started on, and never block it.

    Args:
        config: The sandbox's settings.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._config = config or SandboxConfig()
        self._isolation: Isolation | None = None
        self._zygote: Zygote | None = None
        self._scratch: Scratch | None = None
        self._cgroups: CgroupMaker | None = None
        self._sessions: set[SandboxSession] = set()
        self._users = UserLeases()
        self._booting = asyncio.Lock()
        self._zygote_started_at = 0.0
        self._deaths = 0
        self._self_test_passed = False
        self._closed = False

    @property
    def isolation(self) -> Isolation:
        """The isolation level that the self-test proved.

        Raises:
            SandboxClosedError: The sandbox was not started.
        """
        if self._isolation is None:
            raise SandboxClosedError("the sandbox was not started; start it")
        return self._isolation

    @property
    def sessions(self) -> int:
        """The number of open sessions."""
        return len(self._sessions)

    @property
    def zygote_pid(self) -> int | None:
        """The process id of the zygote, from which interpreters are forked; None if none is running."""
        return None if self._zygote is None or self._zygote.ended else self._zygote.pid

    async def start(self) -> None:
        """Try isolation levels from the strongest down, and start at the first that passes the self-test.

        Raises:
            SandboxUnavailableError: No level at or above the minimum works on this machine.
            ConfigurationError: A module to preload cannot be imported.
        """
        _raise_descriptor_limit()
        self._cgroups = await asyncio.to_thread(cgroups.find)
        config, refusals = self._config, []
        first, last = LADDER.index(config.strongest), LADDER.index(config.minimum)
        for isolation in LADDER[first : last + 1]:
            self._isolation = isolation
            try:
                if isolation is not Isolation.NAMESPACES:
                    self._scratch = await asyncio.to_thread(Scratch)
                await self._boot_zygote()
                await prove(isolation, self.open)
            except SandboxUnavailableError as error:
                refusals.append(f"{isolation}: {error}")
                await self._shut_down()
                continue
            except BaseException:
                await self._shut_down()
                raise
            self._self_test_passed = True
            if refusals:
                logger.info("code runs at the level %s; %s", isolation, "; ".join(refusals))
            return
        self._isolation = None
        raise SandboxUnavailableError(
            f"expected isolation of at least {config.minimum}, and no such level holds here; {'; '.join(refusals)}. "
            "docs/sandbox.md says what each level needs"
        )

    async def open(self, limits: Limits | None = None, *, snapshot: bool = False) -> "SandboxSession":
        """Start an interpreter.

        Args:
            limits: The session's limits.
            snapshot: Whether to go back to the state before an execution that had to be killed; also allows forks.

        Raises:
            SandboxUnavailableError: No interpreter can be started at this time.
            SandboxClosedError: The sandbox was closed, or not started.
        """
        session = SandboxSession(self, limits or Limits(), snapshot=snapshot)
        try:
            async with session._turn:
                await session._ensure_interpreter()
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        """End every session and the zygote. Idempotent."""
        self._closed = True
        await asyncio.gather(*(session.close() for session in list(self._sessions)))
        await self._shut_down()
        async with self._booting:  # a session that was being opened may have started another zygote
            await self._shut_down()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _fork_interpreter(self, limits: Limits, *, snapshot: bool) -> Worker:
        try:
            zygote = await self._ensure_zygote()
            slot, uid = self._users.acquire()
            # Released with the workspace, not with the session, whose branches share the user and may outlive it. And
            # only once, because the slot may soon belong to another session.
            lease = contextlib.ExitStack()
            lease.callback(self._users.release, slot)
            try:
                return await zygote.fork_interpreter(
                    limits,
                    uid,
                    snapshot=snapshot,
                    scratch=self._scratch,
                    cgroups=self._cgroups,
                    removed=lease.close,
                )
            except BaseException:
                lease.close()
                raise
        except OSError as error:  # no process, descriptor or disk space left
            if self._closed:  # the folder of all sessions is removed with the sandbox
                raise SandboxClosedError("the sandbox was closed meanwhile") from error
            raise SandboxUnavailableError(f"expected an interpreter, got none: {error}") from error

    async def _ensure_zygote(self) -> Zygote:
        async with self._booting:
            if not self._closed and (self._zygote is None or self._zygote.ended):
                await self._stop_zygote()
                if asyncio.get_running_loop().time() - self._zygote_started_at > _HEALTHY_UPTIME_S:
                    self._deaths = 0
                await asyncio.sleep(_BACKOFF_S[min(self._deaths, len(_BACKOFF_S) - 1)])
                self._deaths += 1
                await self._boot_zygote()
        if self._closed or self._zygote is None:
            raise SandboxClosedError("the sandbox is closed; make another")
        return self._zygote

    async def _boot_zygote(self) -> None:
        config = self._config
        shown, hidden = await asyncio.to_thread(find_readable, config.readable, config.hidden)
        # With a separate root, a few empty mounts hide paths; otherwise folders that contain one are listed entry by
        # entry.
        is_bound = self.isolation is Isolation.NAMESPACES
        spec = {
            "isolation": self.isolation,
            "preload": list(config.preload),
            "shown": shown,
            "hidden": hidden,
            "links": config.links,
            "readable": shown if is_bound else await asyncio.to_thread(without_hidden, shown, hidden),
            "scratch": None if self._scratch is None else str(self._scratch.path),
            "privileged": session_uid(0) is not None,
        }
        self._zygote_started_at = asyncio.get_running_loop().time()
        self._zygote = Zygote(spec, self._on_zygote_exit)
        await self._zygote.start()

    def _on_zygote_exit(self) -> None:
        # While `start` tries levels, this is expected.
        if self._self_test_passed and not self._closed:
            logger.warning(
                "the process that interpreters are forked from has ended; the next session starts another"
            )

    async def _shut_down(self) -> None:
        await self._stop_zygote()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            await asyncio.to_thread(scratch.close)

    async def _stop_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.close()


def _raise_descriptor_limit() -> None:
    # A session uses half a dozen descriptors, and the usual soft limit is 1024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class SandboxSession:
    """A stateful interpreter. Made by `Sandbox.open`.

    Executions run one at a time. After one that ended the interpreter (`state_lost`), the next starts a new one,
    without variables or files.

    Args:
        sandbox: The sandbox that forks the session's interpreters.
        limits: The session's limits.
        snapshot: Whether to go back to the state before an execution that had to be killed; also allows forks.

    Attributes:
        session_id: The session's id in results and logs.
        isolation: The isolation level of its code.
        limits: The session's limits.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, *, snapshot: bool) -> None:
        self.session_id = uuid4().hex
        self.isolation = sandbox.isolation
        self.limits = limits
        self._sandbox = sandbox
        self._snapshot = snapshot
        self._worker: Worker | None = None
        self._turn = asyncio.Lock()
        self._fork_requests: list[tuple[int, asyncio.Future[list[SandboxSession]]]] = []
        self._forking: asyncio.Task[None] | None = None
        self._forks_abandoned = False
        self._closed = False
        sandbox._sessions.add(self)

    @property
    def alive(self) -> bool:
        """Whether the interpreter, and with it the state, is alive."""
        return self._worker is not None and self._worker.alive

    async def execute(
        self, code: str, *, timeout_s: float | None = None, stdin: str | None = None
    ) -> Execution:
        """Run code, which may use top-level `await`; see `Interpreter.execute`."""
        return (await self._request({"op": "execute", "code": code, "stdin": stdin}, timeout_s))[0]

    async def call(
        self,
        function: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        stdin: str | None = None,
    ) -> FunctionCall:
        """Call a function that the code has defined; values are passed as tagged JSON (`sandbox.values`).

        Args:
            function: The function's name in the session's namespace.
            args: Positional arguments.
            kwargs: Keyword arguments.
            timeout_s: Timeout in seconds, if shorter than the session's limit.
            stdin: Content of standard input; None: empty.

        Raises:
            NotPlainError: An argument cannot be passed as tagged JSON.
            SandboxClosedError: The session was closed.
        """
        message = {
            "op": "call",
            "name": function,
            "args": encode(list(args)),
            "kwargs": encode(dict(kwargs or {})),
            "stdin": stdin,
        }
        execution, text = await self._request(message, timeout_s)
        execution = replace(execution, result=None)
        value = None
        if execution.status == "ok":
            try:
                value = loads(text or b"", max_bytes=MAX_VALUE)
            except NotPlainError as error:
                # Only an interpreter that the code has taken over sends such an answer.
                execution = replace(
                    execution,
                    status="killed",
                    exit_code=EXIT_KILLED,
                    reason=f"its answer is not a value: {error}",
                )
        return FunctionCall(execution=execution, value=value)

    async def serve(self, channel: socket.socket | None) -> None:
        """Turn the interpreter into an agent (`inside/agent.py`); return when it has ended.

        It is killed if its files exceed their limit.

        Args:
            channel: A stream socket whose other end sends requests to the agent; the caller closes it. None for a
                session made by `fork_agent`, which has one.

        Raises:
            SandboxUnavailableError: No interpreter is alive or can be started.
        """
        async with self._turn:
            worker = await self._ensure_interpreter()
            with watch_disk(worker.workspace, worker.kill):
                await worker.serve(channel)

    async def fork_agent(
        self, channel: socket.socket, contexts: int, request_copy: Callable[[str], Awaitable[Any]]
    ) -> "SandboxSession":
        """Fork a serving session, with its interpreters and a copy of its files.

        The session must have been opened with `snapshot`. Only one fork at a time.

        Args:
            channel: The copy's end of its own channel.
            contexts: Number of interpreters of the agent.
            request_copy: Asks the agent to copy itself, and its files to a folder.

        Returns:
            A session that serves the channel once `serve` is awaited.

        Raises:
            SandboxUnavailableError: The session has ended, or cannot be forked.
            FileRefusedError: There is no space for a copy of the files.
        """
        worker = self._worker
        if worker is None or not worker.alive:
            raise SandboxUnavailableError("the sandbox has ended")
        return self._make_session(await worker.fork_agent(channel, contexts, request_copy))

    def _make_session(self, forked: Worker) -> "SandboxSession":
        session = SandboxSession(self._sandbox, self.limits, snapshot=True)
        session._worker = forked
        return session

    @property
    def has_relatives(self) -> bool:
        """Whether other sessions of the same process tree are alive: its forks, or what it was forked from."""
        return self._worker is not None and self._worker.processes.tree.members > 1

    def freeze(self, *, frozen: bool) -> None:
        """Pause or resume all processes of a serving session; it must not have relatives."""
        if self._worker is not None:
            (self._worker.processes.pause if frozen else self._worker.processes.begin)()

    async def put_file(self, path: str, data: bytes) -> FileInfo:
        """Write a file in the workspace; see `Interpreter.put_file`."""
        async with self._turn:
            worker = await self._ensure_files(path)
            return await asyncio.to_thread(worker.workspace.put, path, data)

    async def get_file(self, path: str) -> bytes:
        """Return a file's content; see `Interpreter.get_file`."""
        async with self._turn:
            worker = await self._ensure_files(path)
            return await asyncio.to_thread(worker.workspace.get, path)

    async def list_files(self) -> list[FileInfo]:
        """Return the files in the workspace; see `Interpreter.list_files`."""
        async with self._turn:
            worker = await self._ensure_files("")
            return await asyncio.to_thread(worker.workspace.list)

    async def fork(self, count: int) -> "list[SandboxSession]":
        """Fork the interpreter with its variables and a copy of the files.

        The branches share the session's memory and process limits, and are closed independently.

        Args:
            count: Number of branches.

        Raises:
            ConfigurationError: The session was not opened with `snapshot`.
            SandboxUnavailableError: The branches cannot be made.
            FileRefusedError: There is no space for a copy of the files.
        """
        forks: asyncio.Future[list[SandboxSession]] = asyncio.get_running_loop().create_future()
        self._fork_requests.append((count, forks))
        if self._forking is None:
            self._forking = asyncio.create_task(self._fork_all())
        forking = self._forking
        try:
            return await forks
        except BaseException:
            # A fork in progress is finished first, or the interpreter would be out of step; then its branches are
            # closed.
            if forking is not self._forking:
                await asyncio.shield(forking)
            if forks.done() and not forks.cancelled() and forks.exception() is None:
                await asyncio.gather(*(branch.close() for branch in forks.result()))
            raise

    async def _fork_all(self) -> None:
        """Make all pending forks together, because each request to the interpreter takes time."""
        async with self._turn:
            requests, self._fork_requests, self._forking = self._fork_requests, [], None
            requests = [request for request in requests if not request[1].done()]
            branches: list[SandboxSession] = []
            failure: Exception = SandboxUnavailableError(
                "expected a branch of the interpreter, got none; it has ended, or has too many already"
            )
            try:
                await self._branch(sum(count for count, _ in requests), branches)
            except Exception as error:
                failure = error
            for count, forks in requests:
                if forks.done():
                    continue
                if len(branches) >= count:
                    forks.set_result(branches[:count])
                    branches = branches[count:]
                else:
                    forks.set_exception(failure)
            await asyncio.gather(*(branch.close() for branch in branches))

    async def _branch(self, count: int, branches: "list[SandboxSession]") -> None:
        worker = await self._ensure_files("")
        if not self._snapshot:
            raise ConfigurationError("the session keeps no snapshots; open it with snapshot=True")
        while count:
            copies = await asyncio.to_thread(_copy, worker.workspace, min(count, MAX_BRANCHES_PER_REQUEST))
            forked = await worker.branch(copies)
            branches += map(self._make_session, forked)
            if len(forked) < len(copies):
                return
            count -= len(copies)

    def interrupt(self) -> None:
        """Interrupt the code that runs, or waits for its interpreter to start, as a timeout would; else do nothing."""
        self._forks_abandoned = True
        if self._worker is not None:
            self._worker.stop("interrupt")

    async def restart(self) -> None:
        """Replace the interpreter by a new one, without variables or files; see `Interpreter.restart`."""
        async with self._turn:
            await self._end_life()
            await self._ensure_interpreter()

    async def close(self) -> None:
        """End the interpreter and remove its files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._end_life()
        finally:
            self._sandbox._sessions.discard(self)

    async def _request(
        self, message: dict[str, Any], timeout_s: float | None
    ) -> tuple[Execution, bytes | None]:
        limits = self.limits
        timeout = limits.timeout_s if timeout_s is None else max(0.0, min(timeout_s, limits.timeout_s))
        async with self._turn:
            self._forks_abandoned = False
            began = time.perf_counter()
            text, files = None, tuple[FileInfo, ...]()
            try:
                worker = await self._ensure_interpreter()
            except SandboxUnavailableError as error:
                execution = Execution(
                    status="sandbox_error",
                    exit_code=EXIT_SANDBOX,
                    state_lost=True,
                    execution_time_s=time.perf_counter() - began,
                    reason=str(error),
                )
            except _InterpreterExitedError as error:
                execution = finalize_execution(Execution(status="ok"), str(error), Exit(), limits)
            else:
                execution, text = await self._run(worker, message, timeout)
            if execution.state_lost:
                await self._end_life()
            else:
                files = await worker.workspace.changes()
            return replace(execution, session_id=self.session_id, isolation=self.isolation, files=files), text

    async def _run(
        self, worker: Worker, message: dict[str, Any], timeout_s: float
    ) -> tuple[Execution, bytes | None]:
        if self._forks_abandoned:
            asyncio.get_running_loop().call_soon(worker.stop, "interrupt")
        try:
            with watch_disk(worker.workspace, partial(worker.stop, "disk")):
                execution, text = await worker.request(message, timeout_s)
        except BaseException:
            # Cancelled, by the server's own deadline or a client that disconnected: the result is of no use.
            await self._end_life()
            raise
        if not execution.state_lost and await worker.workspace.is_overfull():
            # The execution ended before the first poll of the disk, or an interrupt was enough to stop it.
            execution = finalize_execution(execution, "disk", Exit(signal=signal.SIGKILL), self.limits)
        return execution, text

    async def _ensure_interpreter(self) -> Worker:
        if self._closed:
            raise SandboxClosedError("the session is closed; open another")
        worker = self._worker
        if worker is None:
            worker = await self._sandbox._fork_interpreter(self.limits, snapshot=self._snapshot)
            if self._closed:
                await asyncio.shield(worker.close())  # type: ignore[unreachable]  # another task has closed it
                raise SandboxClosedError("the session was closed while it started")
            self._worker = worker
            return worker
        if (end := worker.find_end()) is None:
            return worker
        reason, is_by_code = end
        reason += "; variables and files are gone, the next request starts a new interpreter"
        if is_by_code:
            raise _InterpreterExitedError(reason)
        await self._end_life()
        raise SandboxUnavailableError(reason)

    async def _ensure_files(self, path: str) -> Worker:
        try:
            return await self._ensure_interpreter()
        except _InterpreterExitedError as error:
            # Reported here as caused by the code, and again with the next execution.
            raise FileRefusedError(path, str(error)) from None

    async def _end_life(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            # Resources are released even if the caller is cancelled.
            await asyncio.shield(worker.close())


class _InterpreterExitedError(Exception):
    """The code has ended its interpreter, and no result has reported that yet."""


def _copy(workspace: Workspace, count: int) -> list[Workspace]:
    """Return up to `count` copies of the files, as many as there is space for; raise if there is none for the first."""
    copies: list[Workspace] = []
    try:
        while len(copies) < count:
            copies.append(workspace.branch())
    except FileRefusedError:
        if not copies:
            raise
    return copies
