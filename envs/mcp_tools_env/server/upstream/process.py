"""The process of one tool server, with three pipes and a guard between it and this program."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from openenv_core.signals import signal_name

from .errors import ServerFailed

GUARD: Final = str(Path(__file__).with_name("_guard.py"))

GRACE_S: Final = 0.5
"""What a tool server gets to end after its input has, and again after SIGTERM."""

END_S: Final = 8.0
"""What the guard gets to have ended all of it: more than it takes at most, since nobody else knows what strays."""

STDERR_BYTES: Final = 4096
"""How much of what a tool server wrote last to its standard error is kept, for messages."""

CHUNK: Final = 1 << 18


class ServerProcess:
    """A tool server that runs. `start` makes one; `close` has to follow.

    Attributes:
        stdout: What it writes.
        stdin: What it reads; writing never waits.
        ended: Set once it has ended, by itself or not.
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
            command: The program, looked for on the PATH of `environment`, and its arguments.
            environment: All that it gets of one.
            cwd: Where it runs.
            folder: What is removed should this program die without an end.

        Raises:
            ServerFailed: There is no such program, or it cannot be run.
        """
        lifeline_read, lifeline_write = os.pipe()
        status_read, status_write = os.pipe()
        pass_fds = (lifeline_read, status_write)
        fds = tuple(map(str, pass_fds))
        try:
            guard = _spawn((*fds, str(GRACE_S), str(folder), *command), environment, cwd, pass_fds)
        except (OSError, ValueError) as error:
            os.close(lifeline_write)
            os.close(status_read)
            raise ServerFailed(f"expected to run {command[0]!r} in {cwd}, got: {error}") from error
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
                raise ServerFailed(f"expected a program {command[0]!r}, got: {error.strerror}") from error
            raise
        return process

    @property
    def stderr(self) -> str:
        """What it wrote last to its standard error, as one line."""
        text = self._tail.decode(errors="replace")
        return " ".join("".join(char if char.isprintable() else " " for char in text).split())

    def epitaph(self) -> str:
        """Return how it ended, in words."""
        code = self._code
        if code is None:
            how = "was ended"
        elif code < 0:
            how = f"was killed by {signal_name(-code)}"
        else:
            how = f"ended with status {code}"
        return self._with_stderr(how)

    def write(self, data: bytes) -> int:
        """Hand data to it and return how many bytes it has not read yet.

        Raises:
            ServerFailed: It reads no more.
        """
        if self.stdin.is_closing():
            raise ServerFailed("it reads no more")
        self.stdin.write(data)
        return self.stdin.get_write_buffer_size()

    def reads(self) -> bool:
        """Return whether anybody could still read what is written: the system knows it before the guard says it."""
        if self.ended.is_set() or self.stdin.is_closing():
            return False
        poll = select.poll()
        poll.register(self.stdin.get_extra_info("pipe").fileno(), 0)
        return not poll.poll(0)

    async def close(self) -> None:
        """End it and all that it started. Bounded in time; heeds no cancellation by itself."""
        if hasattr(self, "stdin"):
            self.stdin.close()
        if self._lifeline >= 0:
            with suppress(OSError):
                os.write(self._lifeline, b"q")
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            async with asyncio.timeout(END_S):
                await self.ended.wait()
                await asyncio.to_thread(self._guard.wait)  # it has said its last word
        except TimeoutError:
            self._kill_guard()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pipe in self._pipes:
            pipe.close()
        if self._guard.poll() is None:
            self._kill_guard()
            await asyncio.to_thread(self._guard.wait)

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
            asyncio.create_task(self._follow(readers[2])),
        ]

    async def _keep_tail(self, stderr: asyncio.StreamReader) -> None:
        while data := await stderr.read(CHUNK):
            self._tail += data
            del self._tail[:-STDERR_BYTES]

    async def _follow(self, status: asyncio.StreamReader) -> None:
        """Hear what the guard says, to its end."""
        try:
            while line := await status.readline():
                word, _, number = line.decode().strip().partition(" ")
                if word == "ended":
                    self._code = int(number)
                    self.ended.set()  # the guard itself stays until it is let go
                elif word == "started":
                    self._pid = int(number)
                    if not self._started.done():  # whoever waited for it may have been cancelled
                        self._started.set_result(self._pid)
                elif word == "failed" and not self._started.done():
                    self._started.set_exception(OSError(int(number), os.strerror(int(number))))
        finally:
            if not self._started.done():
                self._started.set_exception(ServerFailed("its guard ended before it was started"))
            if self._code is None:
                self._end_group()
            self.ended.set()

    def _end_group(self) -> None:
        """End what is left where the guard could not: it was killed itself."""
        if self._pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)

    def _kill_guard(self) -> None:
        with suppress(ProcessLookupError):
            self._guard.kill()
        self._end_group()

    def _with_stderr(self, how: str) -> str:
        said = self.stderr
        return f"{how}; its last words: {said[-500:]}" if said else how


def _spawn(
    arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, fds: tuple[int, ...]
) -> "subprocess.Popen[bytes]":
    """Start a guard: a fork without copying, which takes the loop a millisecond."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", GUARD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=fds,
        env=dict(environment),
        cwd=cwd,
        start_new_session=True,
    )
