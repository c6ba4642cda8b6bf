"""Connections of the handshake versions: whose session they are, and what they are told beside replies."""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeAlias

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

from servers.mcp.replies import RecentEvents
from servers.mcp.requests import SHARED
from servers.sessions import EnvironmentSession

logger = logging.getLogger("servers")

MAX_WAITING: Final = 512
"""Messages that may wait; beyond them the oldest are dropped, which of progress and changes are worth least."""

FLUSH_TIMEOUT_S: Final = 30.0
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
            await asyncio.wait([self._task], timeout=FLUSH_TIMEOUT_S)

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


MAX_STREAMS: Final = 64
"""Streams of the stateless wire that may listen to one session."""

MAX_SUBSCRIPTIONS: Final = 1024
"""Resources that one connection may subscribe to."""


MAX_SUBSCRIBED: Final = 256 * 1024
"""Characters of their addresses."""


class Peer:
    """One client that a session's changes are told to.

    Attributes:
        channel: What reaches it outside of a request; None before its first.
        level: The name of the least level of log messages that it is sent.
        subscriptions: Addresses of the resources whose changes it is told of.
    """

    def __init__(self) -> None:
        self.channel: ServerSession | None = None
        self.level = "debug"
        self.subscriptions: set[str] = set()
        self._outbox = Outbox()

    def tell(self, event: ServerEvent) -> None:
        """Tell it of a change, if that is any of its business."""
        if not isinstance(event, ResourceUpdated) or event.uri in self.subscriptions:
            self._outbox.put(lambda: self._send(event))

    def close(self) -> None:
        """Tell it nothing any more."""
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


class Hub:
    """All who listen to one session.

    Attributes:
        listen: Serves the streams of the stateless wire.
        peers: The connections.
    """

    def __init__(self) -> None:
        self._bus = InMemorySubscriptionBus()
        self._outbox = Outbox()
        self.listen = ListenHandler(self._bus, max_subscriptions=MAX_STREAMS)
        self.peers: set[Peer] = set()

    def publish(self, event: ServerEvent) -> None:
        """Tell everybody of a change; never waits, from any thread."""
        self._outbox.put(lambda: self._publish(event))

    def close(self) -> None:
        """End the streams."""
        self.listen.close()
        self._outbox.close()
        for peer in self.peers:
            peer.close()

    async def _publish(self, event: ServerEvent) -> None:
        for peer in tuple(self.peers):
            peer.tell(event)
        await self._bus.publish(event)


MAX_LINKS: Final = 64
"""Connections that may share one session; beyond them the one that was used least lately has to go."""


class McpConnection:
    """One connection.

    Args:
        session: What it speaks to.
        owns: It opened the session, whose id it goes by, and which ends with it.

    Attributes:
        id: What the client knows it by.
        inner: What the SDK knows it by; empty until the SDK has drawn it.
        peer: The client.
        kept: What it was told last.
        refused: The SDK did not take the handshake.
        posts: Requests under way.
        idle: Set while there are none.
        last_use: When one ended, by the loop's clock.
    """

    def __init__(self, session: EnvironmentSession, *, owns: bool) -> None:
        self.session = session
        self.owns = owns
        self.id = session.id if owns else f"{session.id}{SHARED}{secrets.token_hex(16)}"
        self.inner = b""
        self.peer = Peer()
        self.kept = RecentEvents()
        self.refused = False
        self.posts = 0
        self.streams = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.last_use = asyncio.get_running_loop().time()

    @contextmanager
    def in_use(self, *, stream: bool) -> Iterator[None]:
        """Count a request as long as the block runs.

        Args:
            stream: It stays open, and answers nothing that anybody waits for.
        """
        if stream:
            self.streams += 1
        else:
            self.posts += 1
            self.idle.clear()
        try:
            yield
        finally:
            self.last_use = asyncio.get_running_loop().time()
            if stream:
                self.streams -= 1
            else:
                self.posts -= 1
                if not self.posts:
                    self.idle.set()


class Links:
    """All connections of one process."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], McpConnection] = {}
        self._by_session: dict[EnvironmentSession, list[McpConnection]] = {}

    def find(self, owner: str, link_id: str) -> McpConnection | None:
        """Return the caller's connection of this id, once the SDK knows it too."""
        link = self._links.get((owner, link_id))
        return link if link is not None and link.inner else None

    def add(self, link: McpConnection) -> None:
        """Count a connection from now on, and let it be found."""
        self._links[link.session.owner, link.id] = link
        self._by_session.setdefault(link.session, []).append(link)

    def remove(self, link: McpConnection) -> bool:
        """Let it be found no more; return whether it was."""
        if self._links.get((link.session.owner, link.id)) is not link:
            return False
        del self._links[link.session.owner, link.id]
        links = self._by_session[link.session]
        links.remove(link)
        if not links:
            del self._by_session[link.session]
        return True

    def of(self, session: EnvironmentSession) -> list[McpConnection]:
        """Return the connections of a session."""
        return list(self._by_session.get(session, ()))

    def superfluous(self, session: EnvironmentSession) -> McpConnection | None:
        """Return the connection that has to go before another may share a session; None where none has to.

        Raises:
            TooManyConnectionsError: All are in use.
        """
        links = self.of(session)
        if len(links) < MAX_LINKS:
            return None
        unused = [link for link in links if not link.posts and not link.streams and not link.owns]
        if not unused:
            raise TooManyConnectionsError
        return min(unused, key=lambda link: link.last_use)


class TooManyConnectionsError(Exception):
    """A session has as many connections as it may have, and all are in use."""
