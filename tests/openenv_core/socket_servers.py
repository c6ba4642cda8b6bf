"""Frames and a silent server for the tests of the client's socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from scripted import url_of
from websockets.asyncio.server import ServerConnection, serve


def frame(total: int, filler: str = "") -> str:
    data = {"observation": {"total": total, "extra": filler}, "reward": None, "done": False}
    return json.dumps({"type": "observation", "data": data})


async def reply_seven(ws: ServerConnection) -> None:
    """Handle a connection: each request is answered with a total of 7."""
    async for _ in ws:
        await ws.send(frame(7))


@asynccontextmanager
async def silent_server(shakes_hands: bool = True) -> AsyncIterator[str]:
    """Yield the URL of a server that answers the handshake, unless told not to, and reads nothing else."""
    finished = asyncio.Event()

    async def be_silent(ws: ServerConnection) -> None:
        ws.transport.pause_reading()
        await finished.wait()
        ws.transport.abort()

    async def be_deaf(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await finished.wait()
        writer.close()

    starting: Any = (
        serve(be_silent, "127.0.0.1", 0, compression=None, ping_interval=None)
        if shakes_hands
        else asyncio.start_server(be_deaf, "127.0.0.1", 0)
    )
    async with await starting as server:
        try:
            yield url_of(server)
        finally:
            finished.set()
