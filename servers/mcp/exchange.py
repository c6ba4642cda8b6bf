"""One HTTP request for the SDK, and what it is sent in reply."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from openenv_core.protocol import jsonrpc
from openenv_core.protocol.jsonrpc import Fault
from servers.execution import end
from servers.mcp.asked import CONNECTION_HEADER, Asked
from servers.mcp.refusals import Refused
from servers.routes.answers import CLIENT_LEFT
from servers.security.bodies import replay
from servers.security.guard import owner_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, and where its response goes.

    Attributes:
        asked: What it asks for.
        scope: Its head.
        body: Its body, which has been taken from `receive`.
        receive: Tells when the client leaves.
        send: Takes the response.
    """

    asked: Asked
    scope: Scope
    body: bytes
    receive: Receive
    send: Send

    @property
    def owner(self) -> str:
        """Fingerprint of the caller's token."""
        return owner_of(self.scope)

    def on_connection(self, inner: bytes, send: Send) -> "Exchange":
        """Return the request as the SDK is given it.

        Args:
            inner: What the SDK knows the connection by; empty where there is none yet.
            send: Takes what it sends.
        """
        headers = [
            (name, value) for name, value in self.scope["headers"] if name.lower() != CONNECTION_HEADER
        ]
        if inner:
            headers.append((CONNECTION_HEADER, inner))
        return replace(self, scope={**self.scope, "headers": headers}, send=send)

    def replayed(self) -> Receive:
        """Return a `receive` that begins with the body."""
        if self.asked.http != "POST":
            return self.receive
        return replay({"type": "http.request", "body": self.body, "more_body": False}, self.receive)

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something, but cancel it when the client leaves.

        Raises:
            Refused: The client has left.
        """
        task = asyncio.create_task(work)
        watch = asyncio.create_task(self._departure())
        try:
            await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Refused(CLIENT_LEFT, Fault(jsonrpc.SERVER_ERROR, "the client has left"))
            return task.result()
        finally:
            await end(watch)
            await end(task)

    async def _departure(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
