"""The conversations that a server holds, so that it can end them in order."""

import asyncio
from contextlib import suppress

from servers.routes.connection import Connection


class Sockets:
    """Every conversation from its accept to the end of its session.

    Attributes:
        draining: A conversation that begins ends at once.
    """

    def __init__(self) -> None:
        self._connections: set[Connection] = set()
        self._left = asyncio.Event()
        self.draining = False

    def enter(self, connection: Connection) -> None:
        """Count a conversation that begins."""
        self._connections.add(connection)
        connection.leaving = self.draining

    def leave(self, connection: Connection) -> None:
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
