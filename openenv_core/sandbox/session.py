"""A session: one interpreter's name, bounds and files, through as many lives as its code makes necessary."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox.answers import InterpreterAnswer
from openenv_core.sandbox.config import Limits
from openenv_core.sandbox.errors import FileRefusedError, SandboxClosedError, SandboxUnavailableError
from openenv_core.sandbox.inside.frames import MAX_VALUE
from openenv_core.sandbox.results import (
    EXIT_INTERRUPTED,
    EXIT_KILLED,
    EXIT_SANDBOX,
    EXIT_TIMEOUT,
    Execution,
    FileInfo,
    FunctionCall,
    Output,
    Status,
    Truncated,
)
from openenv_core.sandbox.snapshots import BranchingWorker
from openenv_core.sandbox.values import NotPlainError, encode, loads
from openenv_core.sandbox.worker import Exit, Worker, WorkerReply
from openenv_core.sandbox.workspace import DiskWatch, Workspace
from openenv_core.signals import signal_name

_WORST: Final = 6
"""Bytes that a character takes at most when it is sent."""

_GROWTH: Final = 2
"""By so much a text may grow when it is sent, of which lines and quotes ask little, and control characters six."""

_ATTEMPTS: Final = 4
"""At shortening a text by how much it is too long on the average; each looks at all of it."""

ZYGOTE_ENDED: Final = "the process that interpreters are forked from has ended"

_STOPPED: Final[dict[str, tuple[Status, int, str]]] = {
    "timeout": ("timeout", EXIT_TIMEOUT, "it ran longer than {timeout:g} s"),
    "interrupt": ("error", EXIT_INTERRUPTED, "it was interrupted: whoever asked for it has given it up"),
    "output": ("output_limit", EXIT_KILLED, "it wrote more than {output} bytes"),
    "disk": ("killed", EXIT_KILLED, "its files grew beyond {disk} bytes or {files} files"),
}
"""Status, exit code and words, by why the supervisor stopped an execution."""


def to_execution(reply: WorkerReply, timeout_s: float, limits: Limits) -> Execution:
    """Return what a reply means; it says nothing of the session.

    Args:
        reply: What became of a request.
        timeout_s: What it was given.
        limits: Of the session.
    """
    answer = reply.answer
    status: Status = "ok"
    code, reason = 0, None
    if answer is not None:
        status, code = answer.status, answer.exit_code  # type: ignore[assignment]
    if reply.stopped in _STOPPED:
        status, code, words = _STOPPED[reply.stopped]
        reason = words.format(
            timeout=timeout_s, output=limits.output_hard_bytes, disk=limits.disk_bytes, files=limits.files
        )
    elif reply.exit is not None:
        status, code, reason = _of_exit(reply.exit, reply.stopped)
    elif answer is not None and answer.status == "rolled_back":
        status, reason = "killed", f"its process ended with status {code}; the state is that of before"
    stdout, stderr = (
        _fitting(text, _GROWTH * limits.output_bytes) for text, _ in (reply.stdout, reply.stderr)
    )
    result, outputs, whole = _shown_outputs(answer, _GROWTH * limits.outputs_bytes)
    return Execution(
        status=status,
        stdout=stdout,
        stderr=stderr,
        exit_code=code,
        error=None if answer is None else answer.error,
        result=result,
        outputs=outputs,
        execution_count=0 if answer is None else answer.count,
        state_lost=reply.exit is not None,
        truncated=Truncated(
            stdout=reply.stdout[1] or stdout is not reply.stdout[0],
            stderr=reply.stderr[1] or stderr is not reply.stderr[0],
            outputs=answer is not None and (answer.truncated or not whole),
        ),
        signal=None if reply.exit is None else reply.exit.signal,
        execution_time_s=reply.took_s,
        max_rss_bytes=None if answer is None else answer.max_rss,
        reason=reason,
    )


def unavailable(why: str, session_id: str, isolation: str, took_s: float) -> Execution:
    """Return what is told where no interpreter could be had."""
    return Execution(
        status="sandbox_error",
        exit_code=EXIT_SANDBOX,
        session_id=session_id,
        state_lost=True,
        execution_time_s=took_s,
        isolation=isolation,
        reason=why,
    )


def _shown_outputs(
    answer: InterpreterAnswer | None, limit: int
) -> tuple[str | None, tuple[Output, ...], bool]:
    """Return the result and the outputs as far as they are to be sent, and whether that is all of them."""
    if answer is None:
        return None, (), True
    text = None if answer.text is None else answer.text.decode("utf-8", "replace")
    result = None if text is None else _fitting(text, limit)
    left = limit - _json_size(result or "")
    outputs = []
    for output in answer.outputs:
        left -= sum(map(_json_size, output.data.values()))
        if left < 0:
            break
        outputs.append(output)
    return result, tuple(outputs), result is text and len(outputs) == len(answer.outputs)


def _fitting(text: str, limit: int) -> str:
    """Return a text as far as it is to be sent in so many bytes; the same object where that is all of it."""
    if _WORST * len(text) <= limit:
        return text
    for _ in range(_ATTEMPTS):
        if (size := _json_size(text)) <= limit:
            return text
        text = text[: len(text) * limit // size]
    return text[: limit // _WORST]


def _json_size(text: str) -> int:
    """Return how many bytes a text takes in JSON, where a control character takes six."""
    plain = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
    controls = sum(text.count(chr(number)) for number in range(32))
    return plain + 5 * controls - 4 * sum(map(text.count, "\b\t\n\f\r")) + text.count('"') + text.count("\\")


def _of_exit(exit_: Exit, broken: str | None) -> tuple[Status, int, str]:
    if exit_.zygote:
        return "sandbox_error", EXIT_SANDBOX, ZYGOTE_ENDED
    if broken is not None:
        return "killed", EXIT_KILLED, broken
    if exit_.memory:
        return "memory", EXIT_KILLED, "it used more memory than its limit"
    if exit_.signal is None:
        return "killed", exit_.code, f"it ended the interpreter with status {exit_.code}"
    return "killed", 128 + exit_.signal, f"the interpreter was ended by {signal_name(exit_.signal)}"


Life: TypeAlias = tuple[Worker, Workspace]
"""A process, and its files."""


class SandboxSession:
    """An interpreter with state. Made by `Sandbox.open`.

    Executions run one after the other. After one that ended the interpreter (`state_lost`) the next begins a new one,
    with nothing of the old.

    Args:
        session_id: Its name.
        limits: Its bounds.
        isolation: What it runs behind.
        start: Makes a new life.
        ended: Called once when it is closed.
        adopt: Makes a session of a life that there is already.
    """

    def __init__(
        self,
        session_id: str,
        limits: Limits,
        isolation: str,
        start: Callable[[], Awaitable[Life]],
        ended: Callable[["SandboxSession"], None],
        adopt: Callable[[Limits, Life], "SandboxSession"],
    ) -> None:
        self._id = session_id
        self._limits = limits
        self._isolation = isolation
        self._start = start
        self._ended = ended
        self._adopt = adopt
        self._worker: Worker | None = None
        self._workspace: Workspace | None = None
        self._turn = asyncio.Lock()
        self._given_up = False
        self._closed = False

    @property
    def session_id(self) -> str:
        """Its name, in results and logs."""
        return self._id

    @property
    def isolation(self) -> str:
        """What its code runs behind."""
        return self._isolation

    @property
    def limits(self) -> Limits:
        """Its bounds."""
        return self._limits

    @property
    def alive(self) -> bool:
        """Whether its interpreter, and with it the state, lives."""
        return self._worker is not None and self._worker.alive

    async def begin(self) -> None:
        """Start the interpreter now rather than with the first request.

        Raises:
            SandboxUnavailableError: None can be had.
        """
        async with self._turn:
            await self._living()

    async def execute(
        self, code: str, *, timeout_s: float | None = None, stdin: str | None = None
    ) -> Execution:
        """Run code in the session's namespace.

        Args:
            code: Python source. `await` may stand outside of functions.
            timeout_s: Seconds; no more than the session's limit.
            stdin: What it reads from standard input; None: nothing.

        Raises:
            SandboxClosedError: The session was closed.
        """
        return (await self._ask({"op": "execute", "code": code, "stdin": stdin}, timeout_s))[0]

    async def call(
        self,
        function: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        stdin: str | None = None,
    ) -> FunctionCall:
        """Call a function that the code has defined, with values that cross as tagged JSON (`sandbox.values`).

        Args:
            function: Its name in the session's namespace.
            args: Its positional arguments.
            kwargs: Its arguments by name.
            timeout_s: Seconds; no more than the session's limit.
            stdin: What it reads from standard input; None: nothing.

        Raises:
            NotPlainError: An argument is no such value.
            SandboxClosedError: The session was closed.
        """
        message = {
            "op": "call",
            "name": function,
            "args": encode(list(args)),
            "kwargs": encode(dict(kwargs or {})),
            "stdin": stdin,
        }
        execution, text = await self._ask(message, timeout_s)
        execution = replace(execution, result=None)
        value = None
        if execution.status == "ok":
            try:
                value = loads(text or b"", max_bytes=MAX_VALUE)
            except NotPlainError as error:
                # Only an interpreter that the code has taken over says such a thing.
                execution = replace(
                    execution, status="killed", exit_code=EXIT_KILLED, reason=f"it answered no value: {error}"
                )
        return FunctionCall(execution=execution, value=value)

    async def put_file(self, path: str, data: bytes) -> FileInfo:
        """Write a file of the workspace, and the folders above it.

        Raises:
            FileRefusedError: The path leaves the workspace, or a limit is reached.
            SandboxUnavailableError: No interpreter can be had.
        """
        async with self._turn:
            workspace = await self._readable(path)
            return await asyncio.to_thread(workspace.put, path, data)

    async def get_file(self, path: str) -> bytes:
        """Return a file's content.

        Raises:
            FileRefusedError: There is no plain file there, or it is too large.
            SandboxUnavailableError: No interpreter can be had.
        """
        async with self._turn:
            workspace = await self._readable(path)
            return await asyncio.to_thread(workspace.get, path)

    async def list_files(self) -> list[FileInfo]:
        """Return the files of the workspace, sorted by path.

        Raises:
            SandboxUnavailableError: No interpreter can be had.
        """
        async with self._turn:
            workspace = await self._readable("")
            return await asyncio.to_thread(workspace.list)

    async def fork(self, count: int) -> "list[SandboxSession]":
        """Branch the interpreter as it stands: variables, and a copy of the files.

        The branches share the session's limits of memory and processes, and end by themselves.

        Args:
            count: How many.

        Raises:
            ConfigurationError: It was not opened with `snapshot`.
            SandboxUnavailableError: They cannot be had.
            FileRefusedError: There is no room for a copy of the files.
        """
        begun, given_up = asyncio.Event(), asyncio.Event()
        making = asyncio.create_task(self._branches(count, begun, given_up))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # Whoever asked is gone; one that is half made is finished first, or the interpreter would be out of step.
            given_up.set()
            if not begun.is_set():
                making.cancel()
            await asyncio.shield(_close_all(making))
            raise

    async def _branches(
        self, count: int, begun: asyncio.Event, given_up: asyncio.Event
    ) -> "list[SandboxSession]":
        branches: list[SandboxSession] = []
        async with self._turn:
            begun.set()
            workspace = await self._readable("")
            worker = self._worker
            if not isinstance(worker, BranchingWorker):
                raise ConfigurationError(
                    "expected a session that keeps snapshots, got one without; open it with snapshot=True"
                )
            try:
                while len(branches) < count and not given_up.is_set():
                    copy = await asyncio.to_thread(workspace.branch, f"branch-{worker.family.made}")
                    try:
                        branched = await worker.branch(copy.inside)
                    except BaseException:
                        await copy.close()
                        raise
                    branches.append(self._adopt(self._limits, (branched, copy)))
            except BaseException:
                await asyncio.gather(*(branch.close() for branch in branches))
                raise
        return branches

    def take_over(self, life: Life) -> None:
        """Go on with a life that there is already."""
        self._worker, self._workspace = life

    def interrupt(self) -> None:
        """Interrupt what runs, or will as soon as its interpreter lives, as its time-out would; else do nothing."""
        self._given_up = True
        if self._worker is not None:
            self._worker.stop("interrupt")

    async def restart(self) -> None:
        """Begin anew, without variables and files.

        Raises:
            SandboxUnavailableError: No interpreter can be had.
        """
        async with self._turn:
            await self._end_life()
            await self._living()

    async def close(self) -> None:
        """End the interpreter and remove its files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._end_life()
        finally:
            self._ended(self)

    async def _ask(self, message: dict[str, Any], timeout_s: float | None) -> tuple[Execution, bytes | None]:
        limit = self._limits.timeout_s
        timeout = limit if timeout_s is None else max(0.0, min(timeout_s, limit))
        async with self._turn:
            self._given_up = False
            began = time.perf_counter()
            try:
                workspace = await self._living()
            except SandboxUnavailableError as error:
                took = time.perf_counter() - began
                return unavailable(str(error), self._id, self._isolation, took), None
            except _EndedItselfError as error:
                await self._end_life()
                return self._to_execution(_nothing(str(error)), timeout, ()), None
            worker = self._worker
            assert worker is not None
            if self._given_up:
                asyncio.get_running_loop().call_soon(worker.stop, "interrupt")
            try:
                with DiskWatch(workspace, lambda: worker.stop("disk")):
                    reply = await worker.request(message, timeout)
            except BaseException:
                # Nobody waits for the rest: the server's own deadline, or a client that went away.
                await self._end_life()
                raise
            if reply.exit is None and await workspace.overfull():
                # It was over before the first look, or an interrupt was enough to end it.
                reply = replace(reply, stopped="disk", exit=Exit(signal=signal.SIGKILL))
            files: tuple[FileInfo, ...] = ()
            if reply.exit is None:
                files = await workspace.changes()
            else:
                await self._end_life()
            return self._to_execution(
                reply, timeout, files
            ), None if reply.answer is None else reply.answer.text

    async def _living(self) -> Workspace:
        if self._closed:
            raise SandboxClosedError("expected an open session, got one that was closed; open another")
        if self._worker is not None and not self._worker.alive:
            if (own := self._worker.own_end()) is not None:
                raise _EndedItselfError(
                    f"{own}; variables and files are gone, and the next request begins anew"
                )
            exit_ = self._worker.exited.result() if self._worker.exited.done() else Exit()
            await self._end_life()
            why = (
                ZYGOTE_ENDED if exit_.zygote else "the interpreter was ended because it did not begin in time"
            )
            raise SandboxUnavailableError(
                f"{why}; variables and files are gone, and the next request begins anew"
            )
        if self._worker is None or self._workspace is None:
            self._worker, self._workspace = await self._start()
        return self._workspace

    async def _readable(self, path: str) -> Workspace:
        try:
            return await self._living()
        except _EndedItselfError as error:
            # Told here as the code's doing, and once more with the next execution.
            raise FileRefusedError(path, str(error)) from None

    def _to_execution(self, reply: WorkerReply, timeout_s: float, files: tuple[FileInfo, ...]) -> Execution:
        execution = to_execution(reply, timeout_s, self._limits)
        return replace(execution, session_id=self._id, isolation=self._isolation, files=files)

    async def _end_life(self) -> None:
        worker, self._worker = self._worker, None
        workspace, self._workspace = self._workspace, None
        # Whoever waits here may go away: what belongs to a life is given back all the same.
        await asyncio.shield(_give_back(worker, workspace))


class _EndedItselfError(Exception):
    """The code has ended its interpreter, and nobody was told yet."""


async def _give_back(worker: Worker | None, workspace: Workspace | None) -> None:
    try:
        if worker is not None:
            await worker.close()
    finally:
        if workspace is not None:
            await workspace.close()


async def _close_all(making: "asyncio.Task[list[SandboxSession]]") -> None:
    await asyncio.wait([making])
    if not making.cancelled() and making.exception() is None:
        await asyncio.gather(*(branch.close() for branch in making.result()))


def _nothing(why: str) -> WorkerReply:
    return WorkerReply(
        answer=None, stopped=why, exit=Exit(), stdout=("", False), stderr=("", False), took_s=0.0
    )
