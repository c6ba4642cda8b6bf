"""What a client is told beside replies: in order, by one task, and never by whoever has something to tell."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeAlias

logger = logging.getLogger("servers")

MAX_WAITING: Final = 512
"""Messages that may wait; beyond them the oldest are dropped, which of progress and changes are worth least."""

FLUSH_S: Final = 30.0
"""Seconds that a reply waits for what is to be told before it."""

Message: TypeAlias = Callable[[], Awaitable[None]]


class Outbox:
    """Made on the loop; may be filled from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Message] = deque(maxlen=MAX_WAITING)
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._woken = False

    def put(self, message: Message) -> None:
        """Have something sent; never waits."""
        if self._closed:
            return
        self._waiting.append(message)
        if not self._woken:  # a thread that tells without end would fill the loop's queue, which has no bound
            self._woken = True
            with suppress(RuntimeError):  # the loop has ended, and the client with it
                self._loop.call_soon_threadsafe(self._wake)

    async def flush(self) -> None:
        """Wait until all is sent, but no longer than FLUSH_S."""
        self._wake()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=FLUSH_S)

    def close(self) -> None:
        """Send nothing any more."""
        self._closed = True
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    def _wake(self) -> None:
        self._woken = False  # first: what is put from now on wakes again
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._send(), name="what an MCP client is told")

    async def _send(self) -> None:
        while self._waiting:
            message = self._waiting.popleft()
            try:
                await message()
            except Exception as error:
                logger.warning("an MCP client could not be told something: %s", error)
