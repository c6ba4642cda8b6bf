"""The wire to a tool server's process, which runs under a guard process."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCMessage, jsonrpc_message_adapter
from pydantic import ValidationError

from openenv_core.guard import guard_command
from openenv_core.signals import signal_name

from .errors import FirstFailure, ServerFailedError, UpstreamWire
from .schemas import MessageThrottle

GRACE_PERIOD_S: Final = 0.5
"""How long a tool server may take to exit after its input is closed, and again after SIGTERM."""

SHUTDOWN_TIMEOUT_S: Final = 8.0
"""How long the guard may take to end everything; more than it ever needs, since only it knows stray processes."""

STDERR_BYTES: Final = 4096
"""How many bytes of a tool server's latest standard error are kept for error messages."""

CHUNK: Final = 1 << 18


class ServerProcess:
    """The process of a running tool server. Create it with `start`, and always `close` it.

    Attributes:
        stdout: The process's standard output.
        stdin: The process's standard input; writing never blocks.
        ended: Set once the process has ended for any reason.
    """

    def __init__(self, guard: "subprocess.Popen[bytes]", lifeline: int, status: int) -> None:
        self._guard = guard
        self._lifeline = lifeline
        self._status_fd = status
        self._tail = bytearray()
        self._tasks: list[asyncio.Task[None]] = []
        self._pipes: list[asyncio.BaseTransport] = []
        self._started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._code: int | None = None
        self._pid: int | None = None
        self.ended = asyncio.Event()
        self.stdout: asyncio.StreamReader
        self.stdin: asyncio.WriteTransport

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], cwd: Path, folder: Path
    ) -> "ServerProcess":
        """Start a tool server.

        Args:
            command: The program, looked up on the PATH of `environment`, and its arguments.
            environment: The complete environment of the process.
            cwd: The working directory.
            folder: The folder that the guard removes if this program dies without closing the server.

        Raises:
            ServerFailedError: There is no such program, or it cannot be run.
        """
        lifeline_read, lifeline_write = os.pipe()
        status_read, status_write = os.pipe()
        pass_fds = (lifeline_read, status_write)
        guarded_command = guard_command(
            command,
            lifeline=lifeline_read,
            status=status_write,
            grace_s=GRACE_PERIOD_S,
            folder=str(folder),
            everything=True,
        )
        try:
            guard = _spawn(guarded_command, environment, cwd, pass_fds)
        except (OSError, ValueError) as error:
            os.close(lifeline_write)
            os.close(status_read)
            raise ServerFailedError(f"expected to run {command[0]!r} in {cwd}, got: {error}") from error
        finally:
            os.close(lifeline_read)
            os.close(status_write)
        process = cls(guard, lifeline_write, status_read)
        try:
            await process._connect()
            await process._started
        except BaseException as error:
            await process.close()
            if isinstance(error, OSError):
                raise ServerFailedError(f"expected a program {command[0]!r}: {error.strerror}") from error
            raise
        return process

    @property
    def stderr(self) -> str:
        """The end of the process's standard error, as one line."""
        text = self._tail.decode(errors="replace")
        return " ".join("".join(char if char.isprintable() else " " for char in text).split())

    async def wait_ended(self) -> str:
        """Wait until the process has ended, and return a description of how."""
        await self.ended.wait()
        code = self._code
        if code is None:
            ending = "was ended"
        elif code < 0:
            ending = f"was killed by {signal_name(-code)}"
        else:
            ending = f"ended with status {code}"
        stderr_tail = self.stderr[-500:]
        return f"{ending}; its last words: {stderr_tail}" if stderr_tail else ending

    def write(self, data: bytes) -> int:
        """Write to the process without blocking, and return the number of bytes that it has not read yet.

        Raises:
            ServerFailedError: The process no longer reads.
        """
        if self.stdin.is_closing():
            raise ServerFailedError("it reads no more")
        self.stdin.write(data)
        return self.stdin.get_write_buffer_size()

    async def close(self) -> None:
        """End the process and everything it started, within a bounded time, even if this call is cancelled."""
        if hasattr(self, "stdin"):
            self.stdin.close()
        if self._lifeline >= 0:
            with suppress(OSError):
                os.write(self._lifeline, b"q")
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    await self.ended.wait()
                    await asyncio.to_thread(self._guard.wait)  # it exits after its last message
        finally:
            for task in self._tasks:
                task.cancel()
            for pipe in self._pipes:
                pipe.close()
            if self._guard.poll() is None:
                with suppress(ProcessLookupError):
                    self._guard.kill()
                self._end_group()
                self._guard.wait()  # returns promptly after SIGKILL
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        guard = self._guard
        assert guard.stdin is not None
        assert guard.stdout is not None
        assert guard.stderr is not None
        status = os.fdopen(self._status_fd, "rb", 0)
        readers = []
        for pipe in (guard.stdout, guard.stderr, status):
            reader = asyncio.StreamReader(limit=CHUNK)
            transport, _ = await loop.connect_read_pipe(
                lambda reader=reader: asyncio.StreamReaderProtocol(reader),  # type: ignore[misc]
                pipe,
            )
            self._pipes.append(transport)
            readers.append(reader)
        self.stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, guard.stdin)
        self._pipes.append(self.stdin)
        self.stdout = readers[0]
        self._tasks = [
            asyncio.create_task(self._keep_tail(readers[1])),
            asyncio.create_task(self._read_status(readers[2])),
        ]

    async def _keep_tail(self, stderr: asyncio.StreamReader) -> None:
        while data := await stderr.read(CHUNK):
            self._tail += data
            del self._tail[:-STDERR_BYTES]

    async def _read_status(self, status: asyncio.StreamReader) -> None:
        """Process the guard's messages until it exits."""
        try:
            while line := await status.readline():
                event, _, number = line.decode().strip().partition(" ")
                if event == "ended":
                    self._code = int(number)
                    self.ended.set()  # the guard itself stays until it is released
                elif event == "started":
                    self._pid = int(number)
                    if not self._started.done():  # the waiting call may have been cancelled
                        self._started.set_result(self._pid)
                elif event == "failed" and not self._started.done():
                    self._started.set_exception(OSError(int(number), os.strerror(int(number))))
        finally:
            if not self._started.done():
                self._started.set_exception(ServerFailedError("its guard ended before it was started"))
            if self._code is None:
                self._end_group()
            self.ended.set()

    def _end_group(self) -> None:
        """Kill the process group if the guard could not, because it was killed itself."""
        if self._pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, fds: tuple[int, ...]
) -> "subprocess.Popen[bytes]":
    """Start a guard. Popen forks without copying memory, so this blocks the event loop for only a millisecond."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=fds,
        env=dict(environment),
        cwd=cwd,
        start_new_session=True,
    )


MAX_MESSAGE_BYTES: Final = 16 << 20
"""The maximum size of a message from a tool server; parsed, it may take twenty times as much memory."""

LINES_PER_MESSAGE: Final = 16
"""How many other lines count as one message for the rate limit."""

MAX_BROKEN: Final = 64
"""How many malformed messages a tool server may write before we stop reading from it."""

MAX_UNREAD_BYTES: Final = 32 << 20
"""How many bytes may be buffered for a tool server that does not read them."""


async def open_stdio(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, folder: Path
) -> UpstreamWire:
    """Start a tool server (see `ServerProcess.start`) and return the wire to it."""
    process, fault = await ServerProcess.start(command, environment, cwd, folder), FirstFailure()
    return UpstreamWire(
        stdio_streams(process, fault),
        fault,
        wait_ended=process.wait_ended,
        stderr_tail=lambda: process.stderr[-500:],
        close=process.close,
    )


@asynccontextmanager
async def stdio_streams(
    process: ServerProcess, fault: FirstFailure
) -> AsyncIterator[
    tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]
]:
    """Yield the streams of a process in the form that `mcp.Client` expects. The caller closes the process.

    Lines that are not JSON objects or do not look like messages are skipped: many servers print other output, objects
    included, which a policy may influence. A malformed line that looks like a message, or one that is too long, is a
    fault, because a call may be waiting for it as its reply.
    """
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        async with to_session:
            lines, throttle, broken_count = _LineSplitter(fault), MessageThrottle(), 0
            while data := await process.stdout.read(CHUNK):
                await throttle.wait(data.count(b"\n") // LINES_PER_MESSAGE)
                for line in lines.split(data):
                    await throttle.wait()
                    if (message := _parse_message(line, fault)) is None:
                        broken_count += _looks_like_message(line)
                        if broken_count > MAX_BROKEN:
                            return
                        continue
                    try:
                        await to_session.send(message)
                    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                        return

    async def write() -> None:
        async with from_session:
            async for message in from_session:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                try:
                    unread = process.write(text.encode() + b"\n")
                except ServerFailedError:
                    await to_session.aclose()
                    return
                if unread > MAX_UNREAD_BYTES:
                    fault.note("it does not read what it is sent")
                    await to_session.aclose()
                    return

    async with from_server, to_server, anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        try:
            yield from_server, to_server
        finally:
            tasks.cancel_scope.cancel()


def _parse_message(line: bytes, fault: FirstFailure) -> SessionMessage | None:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValidationError:
        if (repaired := _repair_message(line)) is not None:
            return SessionMessage(repaired)
        if not _looks_like_message(line):
            return None
        fault.note(f"it wrote what is no JSON-RPC message: {line[:200].decode(errors='replace')!r}")
        return None


def _looks_like_message(line: bytes) -> bool:
    return any(key in line for key in (b'"jsonrpc"', b'"result"', b'"error"', b'"id"'))


def _repair_message(line: bytes) -> JSONRPCMessage | None:
    """Parse a message with lone surrogates in its texts, as JavaScript writes them if a tool cut a character in two."""
    if b"\\ud" not in line.lower():
        return None
    try:
        text = json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace")
        return jsonrpc_message_adapter.validate_json(text, by_name=False)
    except (ValueError, RecursionError):
        return None


class _LineSplitter:
    """Splits incoming data into lines, and drops those that are too long."""

    def __init__(self, fault: FirstFailure) -> None:
        self._fault = fault
        self._parts: list[bytes] = []
        self._length = 0
        self._dropping = False

    def split(self, data: bytes) -> list[bytes]:
        """Return the lines that end in this data and begin like a JSON object."""
        lines = []
        if b"{" not in data:
            # Data without objects is not split, except at its first and last line end.
            data = b"\n".join(data.split(b"\n", 1)[:1] + data.rsplit(b"\n", 1)[1:])
        *complete, remainder = data.split(b"\n")
        for piece in complete:
            self._add(piece)
            if not self._dropping and (line := b"".join(self._parts).strip()).startswith(b"{"):
                lines.append(line)
            self._parts, self._length, self._dropping = [], 0, False
        self._add(remainder)
        return lines

    def _add(self, piece: bytes) -> None:
        self._length += len(piece)
        if self._length > MAX_MESSAGE_BYTES and not self._dropping:
            self._dropping = True
            self._parts = []
            self._fault.note(
                f"it wrote a message of more than {MAX_MESSAGE_BYTES} bytes, which is the most here"
            )
        if piece and not self._dropping:
            self._parts.append(piece)
