"""Carries many connections over one, on both of its sides.

    python3 -I -S -c SOURCE PORT        the inner side, in a container; SOURCE is the text of this file

A connection that the outer side opens becomes one of the inner side to a port of the loopback interface. Each has a
window in either direction, so that a slow reader blocks only its own sender. Neither side trusts the other: an invalid
frame ends the carrier. Needs only the standard library of Python 3.8.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Coroutine

HELLO = b"ropewalk-relay-3\n"
HEADER = struct.Struct(">BIH")
OPEN, DATA, END, RESET, CREDIT = range(5)

CHUNK = 32_768
WINDOW = 262_144
"""Bytes of a connection, in one direction, that may be on their way."""


class MuxError(Exception):
    """The other side ended, or violated the protocol."""


class FrameReader(Protocol):
    """Where frames come from."""

    async def readexactly(self, n: int, /) -> bytes:
        """Return `n` bytes. Raises EOFError if fewer come."""


class Channel:
    """One connection."""

    def __init__(self) -> None:
        self.credit = WINDOW  # bytes that may still be sent to the other side
        self.credited = asyncio.Event()
        self.owed = 0  # bytes received and not credited to the other side yet
        self.received: asyncio.Queue[bytes] = asyncio.Queue()  # b"" is the end
        self.ended = False  # the other side has sent the end
        self.task: asyncio.Future[None] | None = None


class Mux:
    """One side of the carrier, whose output begins with `HELLO` on the inner side.

    Args:
        reader: Where the other side's frames come from.
        writer: Where frames are sent.
    """

    def __init__(self, reader: FrameReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.writing = asyncio.Lock()  # before Python 3.11 only one may wait for `drain`
        self.channels: dict[int, Channel] = {}
        self.last = 0

    async def run(self, port: int | None = None) -> None:
        """Take frames until the carrier ends, then end all connections.

        Args:
            port: Where the other side's connections go; None: it may open none.

        Raises:
            MuxError: The carrier has ended, or the other side violated the protocol.
        """
        try:
            while True:
                kind, number, length = HEADER.unpack(await self.reader.readexactly(HEADER.size))
                if length > CHUNK:
                    raise MuxError("a frame is longer than any may be")
                self.take(kind, number, await self.reader.readexactly(length), port)
        except (EOFError, OSError) as error:
            raise MuxError("the other side ended") from error
        finally:
            self.writer.close()
            for channel in self.channels.values():
                if channel.task is not None:
                    channel.task.cancel()

    def take(self, kind: int, number: int, data: bytes, port: int | None) -> None:
        """Act on a frame."""
        channel = self.channels.get(number)
        if kind == OPEN and port is not None and channel is None:
            self.start(number, self.connect(number, port))
        elif channel is None:
            return  # closed here, before the other side knew
        elif kind in (DATA, END):
            channel.owed += len(data)
            if channel.owed > WINDOW or channel.ended:
                raise MuxError("more came than was asked for")
            channel.ended = kind == END
            if data or channel.ended:
                channel.received.put_nowait(b"" if channel.ended else data)
        elif kind == RESET:
            if channel.task is not None:
                channel.task.cancel()
        elif kind == CREDIT and len(data) == 4:
            channel.credit += int(struct.unpack(">I", data)[0])
            if channel.credit > WINDOW:
                raise MuxError("more was credited than was sent")
            channel.credited.set()
        else:
            raise MuxError("a frame of no known kind")

    def start(self, number: int, work: Coroutine[None, None, None]) -> None:
        """Register a connection and serve it in a task."""
        channel = self.channels[number] = Channel()
        channel.task = asyncio.ensure_future(work)

    def open(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection, whose other end is opened by the other side."""
        self.last = self.last % 0xFFFFFFFF + 1
        number = self.last
        self.start(number, self.serve(number, reader, writer))
        self.send(OPEN, number)

    async def connect(self, number: int, port: int) -> None:
        """Connect to the server, and carry the connection."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except BaseException:
            del self.channels[number]
            self.send(RESET, number)
            return
        await self.serve(number, reader, writer)

    async def serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry both directions of a connection until both have ended, or it is reset on either side."""
        channel = self.channels[number]
        directions = [
            asyncio.ensure_future(self.upload(number, channel, reader)),
            asyncio.ensure_future(self.download(number, channel, writer)),
        ]
        try:
            await asyncio.gather(*directions)
            writer.close()
        except (OSError, asyncio.CancelledError):
            for direction in directions:
                direction.cancel()
            self.send(RESET, number)
            writer.transport.abort()
        finally:
            del self.channels[number]

    async def upload(self, number: int, channel: Channel, reader: asyncio.StreamReader) -> None:
        """Send what a connection brings."""
        while True:
            while not channel.credit:
                channel.credited.clear()
                await channel.credited.wait()
            data = await reader.read(min(channel.credit, CHUNK))
            channel.credit -= len(data)
            async with self.writing:
                self.send(DATA if data else END, number, data)
                await self.writer.drain()
            if not data:
                return

    async def download(self, number: int, channel: Channel, writer: asyncio.StreamWriter) -> None:
        """Write what was received for a connection, and credit it."""
        written = 0
        while True:
            data = await channel.received.get()
            if not data:
                break
            writer.write(data)
            await writer.drain()
            written += len(data)
            if written >= WINDOW // 4:
                channel.owed -= written
                self.send(CREDIT, number, struct.pack(">I", written))
                written = 0
        if writer.can_write_eof():
            writer.write_eof()

    def send(self, kind: int, number: int, data: bytes = b"") -> None:
        """Send a frame, without waiting for room."""
        if not self.writer.transport.is_closing():
            self.writer.write(HEADER.pack(kind, number, len(data)) + data)


async def run_inside(port: int) -> None:
    """Run the inner side, on the standard streams, until the outer side is gone."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", 0))
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(1, "wb", 0)
    )
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    writer.write(HELLO)
    try:
        await Mux(reader, writer).run(port)
    finally:
        os._exit(0)


if __name__ == "__main__":
    asyncio.run(run_inside(int(sys.argv[1])))
