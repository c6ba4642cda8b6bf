"""A WebSocket server with a test's own handler."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from websockets.asyncio.server import ServerConnection, serve


@asynccontextmanager
async def scripted(handler: Callable[[ServerConnection], Awaitable[None]]) -> AsyncIterator[str]:
    async with serve(handler, "127.0.0.1", 0, compression=None) as server:
        yield f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
