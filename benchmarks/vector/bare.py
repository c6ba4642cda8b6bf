"""A bare WebSocket on uvicorn that answers every message with a frame of VECTOR_BYTES bytes."""

import os
from typing import Any

_FRAME = os.urandom(int(os.environ.get("VECTOR_BYTES", "1")))


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Serve one connection."""
    if scope["type"] != "websocket":
        return
    await receive()
    await send({"type": "websocket.accept"})
    while (await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "bytes": _FRAME})
