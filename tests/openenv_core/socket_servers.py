"""Frames and a silent server for the tests of the client's socket."""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scripted import url_of


def frame(total: int, filler: str = "") -> str:
    data = {"observation": {"total": total, "extra": filler}, "reward": None, "done": False}
    return json.dumps({"type": "observation", "data": data})


@asynccontextmanager
async def silent_server(shakes_hands: bool = True) -> AsyncIterator[str]:
    """Yield the URL of a bare TCP server that answers the handshake, unless told not to, and nothing else."""
    finished = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
            fields.setdefault("Sec-WebSocket-Key", "")  # a proxy is asked without one
            digest = hashlib.sha1(
                (fields["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()
            )
            accept = base64.b64encode(digest.digest()).decode()
            answer = (
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Accept: {accept}\r\n\r\n"
            )
            writer.write(answer.encode() if shakes_hands else b"")
            await finished.wait()
        except asyncio.IncompleteReadError:
            pass  # a client may give up before it has sent its request
        finally:
            writer.close()

    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        try:
            yield url_of(server)
        finally:
            finished.set()
