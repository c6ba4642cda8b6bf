"""Who listens to a session: connections of the handshake versions, and streams of the stateless one."""

import logging
from typing import Final

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

from servers.mcp.outbox import Outbox

logger = logging.getLogger("servers")

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
