"""A WebSocket server with a test's own handler."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve


def url_of(server: asyncio.Server | Server) -> str:
    """Return the URL of a server on loopback."""
    return f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"


@asynccontextmanager
async def scripted(
    handler: Callable[[ServerConnection], Awaitable[None]], **options: Any
) -> AsyncIterator[str]:
    """Yield the server's URL. The options are those of `websockets.serve`."""
    async with serve(handler, "127.0.0.1", 0, compression=None, **options) as server:
        yield url_of(server)
