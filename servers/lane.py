"""A quick lane through uvicorn's WebSocket protocol, for frames that are whole.

Nearly every frame of the OpenEnv wire is one unfragmented text frame that arrives in one piece while the
application waits for it. The general way takes such a frame through a generator-based parser, two events, a queue
and, before and after, a system call that stops and starts reading. The lane reads it where it lies. Whatever is not
that simple goes the general way, as if there were no lane.
"""

import asyncio
import logging
import struct
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Final

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

try:
    from websockets.speedups import apply_mask
except ImportError:  # a build without compiled parts
    from websockets.utils import apply_mask

logger = logging.getLogger("servers")

_WHOLE_TEXT: Final = 0x81
"""First byte of a frame: the last of its message, no extension, text."""
_MASKED: Final = 0x80
_SHORT: Final = 126
_MASK_BYTES: Final = 4
_AFTER_ACCEPT: Final = ("websocket.send", "websocket.close")


_OF_UVICORN: Final = (
    "queue",
    "conn",
    "frames",
    "writable",
    "handshake_complete",
    "close_sent",
    "disconnected",
)
_OVERRIDDEN: Final = (
    "handle_connect",
    "handle_cont",
    "handle_ping",
    "send_receive_event_to_app",
    "resume_writing",
)
_OF_WEBSOCKETS: Final = ("reader.buffer", "parser.gi_yieldfrom", "extensions", "state")


def missing() -> list[str]:
    """Return what the lane, and `servers.protocols`, rely on of uvicorn and websockets beyond what these promise."""
    base = WebSocketsSansIOProtocol
    names = [f"uvicorn's {name}" for name in _OF_UVICORN if name not in base.__init__.__code__.co_names]
    names += [f"uvicorn's {name}()" for name in _OVERRIDDEN if not hasattr(base, name)]
    if not hasattr(StreamReader, "at_eof"):
        names.append("websockets' at_eof()")
    connection = ServerProtocol()
    for name in _OF_WEBSOCKETS:
        try:
            attrgetter(name)(connection)
        except AttributeError:
            names.append(f"websockets' {name}")
    return names


def _is_safe() -> bool:
    """Whether the lane can be taken; say so where it cannot."""
    if names := missing():
        logger.warning(
            "this release of uvicorn (%s) or websockets (%s) has no %s: frames go the general way, slower, and "
            "not every bound on strangers may hold; pip install 'ropewalk[server]' brings releases that fit",
            version("uvicorn"),
            version("websockets"),
            ", ".join(names),
        )
    return not names


SAFE: Final = _is_safe()
"""Whether the lane is taken at all."""


class ReceiveQueue:
    """What the application has yet to receive: a few hundred bytes where asyncio's queue takes some thousand."""

    __slots__ = ("_events", "_waiter")

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, event: Any) -> None:
        """Add an event. How many there can be is bounded by the protocol, which stops reading."""
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        """Wait for the next event; for one caller at a time."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.pop(0)

    def empty(self) -> bool:
        """Whether there is none."""
        return not self._events


class FastLane(WebSocketsSansIOProtocol):
    """uvicorn's sans-I/O WebSocket protocol with the lane."""

    _listening: bool = False
    _plain: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if SAFE:
            self.queue = ReceiveQueue()  # type: ignore[assignment]

    def handle_connect(self, event: Request) -> None:
        """Start the application on a handshake."""
        super().handle_connect(event)
        self._plain = SAFE and self.response.status_code == 101 and not self.conn.extensions

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        text = self._whole(data) if self._listening and self._plain else None
        if text is None:
            super().data_received(data)
        else:
            # The application waits for it, so reading goes on.
            self.queue.put_nowait({"type": "websocket.receive", "text": text})

    async def receive(self) -> Any:
        """Wait for the next event."""
        self._listening = True
        try:
            return await super().receive()
        finally:
            self._listening = False

    async def send(self, message: Any) -> None:
        """Send a frame, or accept, refuse or close."""
        if (
            self._plain
            and message["type"] == "websocket.send"
            and self.writable.is_set()
            and self.handshake_complete
            and not self.disconnected
            and not self.close_sent
            and self.conn.state is State.OPEN
            and (text := message.get("text")) is not None
        ):
            self.transport.write(_frame(text))
            return
        if self.close_sent and self.handshake_complete and message["type"] in _AFTER_ACCEPT:
            # A broken frame, or a client that answers no ping, has made the protocol close by itself, which the
            # application cannot know; to uvicorn that is a fault of the application.
            raise ClientDisconnected
        await super().send(message)

    def _whole(self, data: bytes) -> str | None:
        """Return the text of a frame that is all there is; None for everything else."""
        length = len(data)
        if length < 2 + _MASK_BYTES or data[0] != _WHOLE_TEXT:
            return None
        size = data[1] - _MASKED
        start = 2
        if size >= _SHORT:
            if size > _SHORT or length < 4 + _MASK_BYTES:
                return None
            size = data[2] << 8 | data[3]
            start = 4
        if size < 0 or length != start + _MASK_BYTES + size:
            return None
        if not self._between_frames():
            return None
        body = start + _MASK_BYTES
        try:
            return apply_mask(data[body:], data[start:body]).decode()
        except UnicodeDecodeError:
            return None

    def _between_frames(self) -> bool:
        """Whether nothing is under way that the next frame could belong to, and no frame waits before it."""
        return (
            not self.conn.reader.buffer
            # Of a frame whose head has been read nothing may be left in the buffer: what comes is its payload.
            and _waits_for_frame(self.conn.parser)
            and not self.frames
            and self.queue.empty()
            and self.handshake_complete
            and not self.close_sent
            and self.conn.state is State.OPEN
        )


def _waits_for_frame(parser: Any) -> bool:
    """Whether the parser of a connection stands where a frame begins."""
    waiting = parser.gi_yieldfrom
    return waiting is not None and waiting.gi_code is StreamReader.at_eof.__code__


def _frame(text: str) -> bytes:
    """Return an unmasked frame that holds the text."""
    payload = text.encode()
    size = len(payload)
    if size < _SHORT:
        return bytes((_WHOLE_TEXT, size)) + payload
    if size < 1 << 16:
        return struct.pack("!BBH", _WHOLE_TEXT, 126, size) + payload
    return struct.pack("!BBQ", _WHOLE_TEXT, 127, size) + payload
