"""What servers of the socket's tests say, and one that says nothing."""

import asyncio
import json
from collections.abc import Callable
from typing import Any


def frame(total: int, filler: str = "") -> str:
    data = {"observation": {"total": total, "extra": filler}, "reward": None, "done": False}
    return json.dumps({"type": "observation", "data": data})


def silent(shakes_hands: bool = True) -> tuple[asyncio.Event, Callable[..., Any]]:
    """A server of bare TCP that shakes hands, if it does, and then never says a word."""
    import base64
    import hashlib

    over = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
        fields.setdefault("Sec-WebSocket-Key", "")  # a proxy is asked without one
        digest = hashlib.sha1((fields["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode())
        accept = base64.b64encode(digest.digest()).decode()
        answer = (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\n\r\n"
        )
        writer.write(answer.encode() if shakes_hands else b"")
        await over.wait()
        writer.close()

    return over, handler
