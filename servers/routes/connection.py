"""What a server says on one socket, and the sockets that it holds."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, Final, TypeAlias

from openenv_core.watchdog import Watchdog
from servers.execution import keep

logger = logging.getLogger("servers")

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

NORMAL_CLOSURE = 1000
GOING_AWAY = 1001

ABORT = "ropewalk.abort"
"""The extension in a socket's scope that holds a callable without arguments, where the server has it: it drops the
connection at once, with whatever the client has left unread."""


class DisconnectedError(Exception):
    """There is nobody to talk to any more."""


class SocketSender:
    """The sending side of one socket.

    Args:
        scope: The socket's.
        send: The server's.
        send_timeout_s: Seconds that a reply may lie unread before the client is dropped; 0 for ever.
        step_timeout_s: Seconds that an answer may take where its environment does not run on the loop.

    Attributes:
        watch: Looks at the time of what is under way: an answer, or the sending of it.
        busy: A request is being answered.
        leaving: No further request is taken.
        over: The last word has been said; only the close may be on its way.
        task: The task that holds the conversation. It is cancelled when somebody else ends it.
    """

    __slots__ = ("_abort", "_patience_s", "_send", "busy", "leaving", "over", "task", "watch")

    def __init__(
        self, scope: Message, send: Send, send_timeout_s: float, step_timeout_s: float | None
    ) -> None:
        self._send = send
        self._abort: Callable[[], None] | None = (scope.get("extensions") or {}).get(ABORT)
        self._patience_s = send_timeout_s or None
        shortest = min(send_timeout_s or math.inf, step_timeout_s or math.inf)
        self.watch = Watchdog(shortest, self._drop)
        self.busy = True
        self.leaving = self.over = False
        self.task: asyncio.Task[Any] | None = None

    async def say(self, text: str) -> None:
        """Send one frame.

        Raises:
            DisconnectedError: Somebody else has ended the conversation.
        """
        if self.over:
            raise DisconnectedError
        self.watch.expect(self._patience_s, self._drop)
        await self._send({"type": "websocket.send", "text": text})
        self.watch.stop()

    async def close(self, code: int = NORMAL_CLOSURE, last: str | None = None) -> None:
        """Close the socket, after a last frame where there is one.

        Raises:
            DisconnectedError: Somebody else has ended the conversation.
        """
        if last is not None:
            await self.say(last)
        if self.over:
            raise DisconnectedError
        self.over = True
        self.watch.expect(self._patience_s, self._drop)
        await self._send({"type": "websocket.close", "code": code})
        self.watch.stop()

    def leave(self) -> None:
        """End the conversation with the reply that is under way, or at once where there is none."""
        self.leaving = True
        if not self.busy and not self.over:
            self.end(GOING_AWAY)

    def end(self, code: int, last: str | None = None) -> None:
        """End the conversation from outside, whatever the one who holds it is waiting for."""
        keep(asyncio.create_task(self._end(code, last)))

    async def _end(self, code: int, last: str | None) -> None:
        try:
            await self.close(code, last)
        except (DisconnectedError, OSError):
            pass
        finally:
            self._interrupt()

    def release(self) -> None:
        """Give back what the connection holds."""
        self.watch.close()

    def _drop(self) -> None:
        logger.warning("a client leaves its replies unread; its connection is dropped")
        self.over = True
        if self._abort is not None:
            self._abort()
        self._interrupt()

    def _interrupt(self) -> None:
        if self.task is not None and not self.task.done():
            self.task.cancel()


class Sockets:
    """Every conversation from its accept to the end of its session.

    Attributes:
        draining: A conversation that begins ends at once.
    """

    def __init__(self) -> None:
        self._connections: set[SocketSender] = set()
        self._left = asyncio.Event()
        self.draining = False

    def enter(self, connection: SocketSender) -> None:
        """Count a conversation that begins."""
        self._connections.add(connection)
        connection.leaving = self.draining

    def leave(self, connection: SocketSender) -> None:
        """Count it no more: its session has ended."""
        self._connections.discard(connection)
        self._left.set()

    async def drain(self, deadline: float) -> None:
        """Ask every conversation to end and wait until the last one has.

        Args:
            deadline: On the loop's clock; it returns then in any case.
        """
        self.draining = True
        for connection in list(self._connections):
            connection.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._connections:
                    self._left.clear()
                    await self._left.wait()


SESSION_PATH: Final = "/ws"
MCP_PATH: Final = "/mcp"


def path_of(scope: Mapping[str, Any]) -> str:
    """Return a connection's path without what a parent app, if any, has mounted this one under."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
