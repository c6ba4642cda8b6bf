"""The pool's side of one worker process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from rl_bridge.errors import RewardFailed
from rl_bridge.rewards.wire import BEGUN, LENGTH, Reply

GUARD = Path(__file__).with_name("_guard.py")
REAP_S = 10.0
"""How long a guard that was told to end its worker may take."""


class RewardWorker:
    """One process that evaluates one response at a time. `start` makes it.

    Args:
        guard: The process that ends the worker with everything that it started.
        reader: From the worker.
        writer: To the worker.
    """

    def __init__(
        self, guard: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._guard = guard
        self._reader = reader
        self._writer = writer
        self.pid = 0
        """The process that calls the functions."""

    @classmethod
    async def start(cls, functions: Sequence[str], *, timeout_s: float) -> Self:
        """Start a process and wait until it has its functions.

        Args:
            functions: Dotted paths.
            timeout_s: Seconds that their import may take.

        Raises:
            RewardFailed: They are not there, or the process ended, or took too long.
            OSError: There can be no further process.
        """
        guard, connection = _spawn(functions)
        self = cls(guard, *await asyncio.open_connection(sock=connection))
        try:
            async with asyncio.timeout(timeout_s):
                reply = Reply.decode(await self._frame())
            if reply.error:
                raise RewardFailed(reply.error)
        except BaseException as error:
            await self.kill()
            names = ", ".join(functions)
            if isinstance(error, TimeoutError):
                raise RewardFailed(
                    f"expected {names} to be imported within {timeout_s:g} s, it is not done; "
                    "raise reward.start_timeout_seconds, or see what the import waits for"
                ) from error
            if isinstance(error, ConnectionError):
                raise RewardFailed(
                    f"expected {names} to be imported, but the process ended over it; its output tells why"
                ) from error
            raise
        self.pid = reply.pid
        return self

    @property
    def lost(self) -> bool:
        """Whether the process has ended."""
        return self._reader.at_eof() or self._guard.poll() is not None

    async def ask(self, content: bytes, timeout_s: float) -> Reply:
        """Have one request evaluated.

        Raises:
            TimeoutError: It took too long. The process is still at it.
            BrokenPipeError: The process had ended before it began.
            ConnectionError: The process ended meanwhile.
        """
        begun = False
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(LENGTH.pack(len(content)) + content)
                await self._writer.drain()
                begun = await self._frame() == BEGUN
                return Reply.decode(await self._frame())
        except ConnectionError as error:
            if begun:
                raise
            raise BrokenPipeError("the worker's process had ended before it began") from error

    async def kill(self) -> None:
        """End the process and everything that it started."""
        self._writer.transport.abort()
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):
            self._guard.stdin.close()
        await asyncio.shield(asyncio.to_thread(self._reap))

    def _reap(self) -> None:
        try:
            self._guard.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        if self._guard.returncode < 0 and self.pid:
            # Somebody killed the guard. The kernel has killed the worker then, but nobody what that started.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _frame(self) -> bytes:
        try:
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the worker's process has ended") from error


def _spawn(functions: Sequence[str]) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        fd = str(theirs.fileno())
        worker = [sys.executable, "-m", "rl_bridge.rewards._worker", fd, *functions]
        try:
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), fd, *worker],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return guard, ours
