"""The listeners of a session, and the notifications sent to them."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar

from mcp.server.session import ServerSession
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ServerEvent,
    ToolsListChanged,
)

logger = logging.getLogger("servers")

MAX_WAITING: Final = 512
"""Messages that may be queued; beyond that the oldest are dropped, the least useful progress and changes."""

_FLUSH_TIMEOUT_S: Final = 30.0
"""Seconds that a reply waits for the messages to be sent before it."""

_MAX_STREAMS: Final = 64
"""Streams of the stateless wire per session."""


class Outbox:
    """A queue of messages to send. Created on the event loop; any thread may add to it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Callable[[], Awaitable[None]]] = deque(maxlen=MAX_WAITING)
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._wakeup_scheduled = False

    def put(self, message: Callable[[], Awaitable[None]]) -> None:
        """Queue a message; never blocks."""
        if self._closed:
            return
        self._queue.append(message)
        if (
            not self._wakeup_scheduled
        ):  # a thread that sends without end would fill the event loop's unbounded queue
            self._wakeup_scheduled = True
            with suppress(RuntimeError):  # the event loop is closed, and so is the connection
                self._loop.call_soon_threadsafe(self._on_wake)

    async def flush(self) -> None:
        """Wait until all messages are sent, for at most _FLUSH_TIMEOUT_S."""
        self._on_wake()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """Drop the queued messages and send no more."""
        self._closed = True
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()

    def _on_wake(self) -> None:
        self._wakeup_scheduled = False  # first, so that a message put from now on wakes the event loop again
        if self._queue and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._send(), name="messages to an MCP client")

    async def _send(self) -> None:
        while self._queue:
            message = self._queue.popleft()
            try:
                await message()
            except Exception as error:
                logger.warning("a message to an MCP client could not be sent: %s", error)


class Peer:
    """One client that is notified of a session's changes.

    Attributes:
        channel: The SDK's session, for messages outside of a request; None before its first request.
        level: The lowest log level that it is sent.
        subscriptions: URIs of the resources whose changes it is notified of.
        refused: Whether the SDK has refused its handshake.
    """

    def __init__(self) -> None:
        self.channel: ServerSession | None = None
        self.level = "debug"
        self.subscriptions: set[str] = set()
        self.refused = False
        self._outbox = Outbox()

    def publish(self, event: ServerEvent) -> None:
        """Notify the client of a change that it has subscribed to."""
        if not isinstance(event, ResourceUpdated) or event.uri in self.subscriptions:
            self._outbox.put(lambda: self._send(event))

    def close(self) -> None:
        """Send the client no more notifications."""
        self._outbox.close()

    async def _send(self, event: ServerEvent) -> None:
        channel = self.channel
        if channel is None:
            return
        match event:
            case ToolsListChanged():
                await channel.send_tool_list_changed()
            case PromptsListChanged():
                await channel.send_prompt_list_changed()
            case ResourcesListChanged():
                await channel.send_resource_list_changed()
            case ResourceUpdated(uri):
                await channel.send_resource_updated(uri)


PeerT = TypeVar("PeerT", bound=Peer)


class Hub(Generic[PeerT]):
    """The listeners of one session.

    Attributes:
        listen: The SDK's handler of `subscriptions/listen`, the streams of the stateless wire.
        peers: The clients with a connection, by its id.
    """

    def __init__(self) -> None:
        self._bus = InMemorySubscriptionBus()
        self._outbox = Outbox()
        self.listen = ListenHandler(self._bus, max_subscriptions=_MAX_STREAMS)
        self.peers: dict[str, PeerT] = {}

    def publish(self, event: ServerEvent) -> None:
        """Notify all listeners of a change. Never blocks; callable from any thread."""
        self._outbox.put(lambda: self._publish(event))

    def close(self) -> None:
        """End the streams and all notifications."""
        self.listen.close()
        self._outbox.close()
        for peer in self.peers.values():
            peer.close()

    async def _publish(self, event: ServerEvent) -> None:
        for peer in tuple(self.peers.values()):
            peer.publish(event)
        await self._bus.publish(event)
