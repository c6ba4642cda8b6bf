"""A process's standard streams as the wire of MCP: nothing else gets to write to it, or to read from it."""

import asyncio
import logging
import os
import threading
from contextlib import suppress
from typing import Final, NamedTuple

import anyio

from servers.threads import ThreadPool

logger = logging.getLogger("servers")

MAX_READ_AHEAD: Final = 16
"""Lines."""


class Wire(NamedTuple):
    """The descriptors of the wire, which this process alone has."""

    reading: int
    writing: int


def take_wire() -> Wire:
    """Take standard input and output for the wire.

    From now on standard input is empty, and standard output is standard error: what an environment prints, or what it
    starts, goes to the log.
    """
    wire = Wire(os.dup(0), os.dup(1))  # not inheritable
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return wire


class Lines:
    """The lines that come, for the SDK's transport.

    A thread of its own reads, and does not keep the process from ending.

    Args:
        descriptor: Where from.
        limit: The greatest number of bytes in a line; longer ones are dropped.
    """

    def __init__(self, descriptor: int, limit: int) -> None:
        self._file = os.fdopen(descriptor, "rb")
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._room = threading.Semaphore(MAX_READ_AHEAD)
        threading.Thread(target=self._read, name="lines of MCP", daemon=True).start()

    def __aiter__(self) -> "Lines":
        return self

    async def __anext__(self) -> str:
        """Return the next line."""
        line = await self._lines.get()
        self._room.release()
        if line is None:
            raise StopAsyncIteration
        return line

    def _read(self) -> None:
        try:
            while line := self._file.readline(self._limit + 1):
                if len(line) > self._limit:
                    logger.error("a message of more than %d bytes was dropped", self._limit)
                    while line and not line.endswith(b"\n"):
                        line = self._file.readline(self._limit)
                elif line.strip():
                    self._put(line.decode("utf-8", "replace"))
        except OSError as error:
            logger.error("what the host sends cannot be read any more: %s", error)
        self._put(None)

    def _put(self, line: str | None) -> None:
        self._room.acquire()
        with suppress(RuntimeError):  # the loop has ended, and nobody reads any more
            self._loop.call_soon_threadsafe(self._lines.put_nowait, line)


class Pipe:
    """Where lines go, for the SDK's transport; a host that does not read holds up no other thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pool = ThreadPool(1, "replies of MCP")

    async def write(self, text: str) -> None:
        """Write a line.

        Raises:
            ClosedResourceError: The host has closed its end.
        """
        succeeded, value = await self._pool.submit(self._write, text.encode()).waiter
        if not succeeded:
            logger.info("the host does not listen any more: %s", value)
            raise anyio.ClosedResourceError

    async def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
