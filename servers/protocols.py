"""uvicorn's two protocols, with the bounds that a server needs which strangers can reach, and a fast lane.

uvicorn waits for ever for a request that never ends and for a client that never reads, answers pings without
limit, and keeps one object for every fragment of a message. Nothing here is done for a message that comes
whole and is read: timers run while a request's head is incomplete or a reply lies unread.

Nearly every frame of the OpenEnv wire is one unfragmented frame that arrives in one piece while the
application waits for it. The general way takes such a frame through a generator-based parser, two events, a queue
and, before and after, a system call that stops and starts reading. The lane reads it where it lies, and has the
application answer it there where nothing, or a thread alone, has to be waited for. Whatever is not that simple goes the
general way, as if there were no lane.
"""

import asyncio
import functools
import logging
import resource
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Final
from weakref import WeakKeyDictionary

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

from servers.routes.websocket import LANE

try:
    from websockets.speedups import apply_mask
except ImportError:  # a build without compiled parts
    from websockets.utils import apply_mask

PING_INTERVAL_S: Final = 20.0
"""Seconds between pings on a WebSocket. They keep proxies from taking a long thought for the end."""

PEER_GONE_AFTER_S: Final = 40.0
"""Seconds after which a machine that acknowledges nothing counts as gone."""

PONG_TIMEOUT_S: Final = 300.0
"""Seconds that a client whose machine is there may leave a ping unanswered: its event loop may be busy."""

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: 57\r\n\r\n"
    b'{"detail":"expected a free connection; try again later"}\n'
)


_log = logging.getLogger("uvicorn.error")
# It would write a traceback for each frame that a stranger sends; the connection is closed for it with status 1007.
_log.addFilter(lambda record: record.msg != "Invalid UTF-8 sequence received from client.")


def raise_descriptor_limit() -> None:
    """Let this process hold as many connections as the system allows it: the usual limit is 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@functools.cache
def connection_limit() -> int:
    """Return how many connections one process takes; a sixteenth of its descriptors stays for other uses."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - max(64, soft // 16)


def _tune(transport: asyncio.Transport) -> None:
    """Set what a connection needs of the system.

    No write waits for the acknowledgement of the one before: a response's head and body are two writes. asyncio sees
    to that only for sockets that name TCP as their protocol, which those of a listener made elsewhere do not.

    What is sent and not acknowledged for a while breaks the connection. The other side's system acknowledges also for
    a process that is busy, so this tells a machine that has gone from a trainer that is long at its sums, and lets
    pings wait for the latter.
    """
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(PEER_GONE_AFTER_S * 1000)
            )


class _Watched(asyncio.Protocol):
    """A protocol that drops a client that does not read: a timer runs while data is unsent."""

    unread_s: float = 30.0
    """Seconds without progress after which a client that does not read is dropped."""

    transport: Any
    _unread: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Watch from now on."""
        super().pause_writing()
        if self._unread is None:
            self._watch_unread(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """All is sent."""
        super().resume_writing()
        self._stop_watching()

    def _watch_unread(self, unsent: int) -> None:
        loop = asyncio.get_running_loop()
        self._unread = loop.call_later(self.unread_s, self._check_unread, unsent)

    def _check_unread(self, before: int) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent >= before:
            self.transport.abort()
        elif unsent:  # it is slow, but it reads
            self._watch_unread(unsent)

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


class HttpProtocol(_Watched, H11Protocol):
    """HTTP/1.1 that does not wait for ever."""

    head_s: float = 10.0
    """Seconds from the first byte of a request, or from the connection, to the end of its headers."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or turn away a connection that is one too many."""
        if len(self.connections) >= connection_limit():
            self.transport = transport
            transport.write(_BUSY)
            transport.close()
            return
        # Whatever lies unsent is told to pause_writing, however little it is.
        transport.set_write_buffer_limits(high=0)
        _tune(transport)
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End, with every timer."""
        self._head_came()
        self._stop_watching()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        if self.conn.their_state is h11.IDLE:
            self._unset_keepalive_if_required()
            if self._head_timer is None:
                self._await_head()
        # In any other state the timer that may run is the one of a response that was sent before the request
        # had ended, and a body that trickles on must not stop it.
        self.conn.receive_data(data)
        self.handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._head_came()

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Hand the connection over."""
        self._head_came()
        self._stop_watching()  # the response to an earlier request; the next protocol watches from here
        if any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        ):
            self.send_400_response("expected a WebSocket handshake without a body, got one with a body\n")
            return
        super().handle_websocket_upgrade(event)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


_WHOLE_TEXT: Final = 0x81
"""First byte of a frame: the last of its message, no extension, text."""
_WHOLE_BINARY: Final = 0x82
_WHOLE: Final = (_WHOLE_TEXT, _WHOLE_BINARY)
_MASKED: Final = 0x80
_SHORT: Final = 126
_MASK_BYTES: Final = 4

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
    "handle_pong",
    "send_receive_event_to_app",
    "resume_writing",
)
_OF_WEBSOCKETS: Final = ("reader.buffer", "parser.gi_yieldfrom", "extensions", "state")


def missing() -> list[str]:
    """Return what this file relies on of uvicorn and websockets beyond what these promise, and does not find."""
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
        logging.getLogger("servers").warning(
            "this release of uvicorn (%s) or websockets (%s) has no %s: frames go the general way, slower, and "
            "not every bound on strangers may hold; pip install 'ropewalk[server]' brings releases that fit",
            version("uvicorn"),
            version("websockets"),
            ", ".join(names),
        )
    return not names


SAFE: Final = _is_safe()
"""Whether the lane is taken at all."""


_SPELL: Final = 16
"""Events of one connection that the application takes before others have their turn."""


class _ReceiveQueue:
    """What the application has yet to receive: a few hundred bytes where asyncio's queue takes some thousand.

    How many events there can be is bounded by the protocol, which stops reading. One read may bring thousands of small
    frames; an application that waits for nothing else would take them all in one turn of the loop.
    """

    __slots__ = ("_events", "_taken", "waiter")

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._taken = 0  # since others have had their turn
        self.waiter: asyncio.Future[None] | None = None

    def put_nowait(self, event: Any) -> None:
        self._events.append(event)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def get(self) -> Any:
        """Wait for the next event; for one caller at a time."""
        self._taken += 1
        if self._taken > _SPELL:
            self._taken = 1
            await asyncio.sleep(0)
        while not self._events:
            self._taken = 1
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        return self._events.pop(0)

    def empty(self) -> bool:
        return not self._events


MAX_CONTROL_FRAMES: Final = 256
"""Pings and pongs that one read may bring; whoever sends more only keeps the server busy."""


_GATHERED_BYTES: Final = 16 * 1024
"""How much of one connection waits for the end of a turn."""


_outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, list["_Writer"]] = WeakKeyDictionary()


class _Writer:
    """A transport whose writes wait for the end of the turn; all else is the transport's own.

    A write wakes whoever waits at the other end. Between two writes that some work lies between, it falls asleep again;
    that wake-up is the dearer half of a short reply. So what is written in one turn of an event loop goes out together.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._data = b""
        self._loop = asyncio.get_running_loop()
        self._outbox = _outboxes.setdefault(self._loop, [])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write at the end of the turn; at once what is large, so that it shows whether it is read."""
        if not self._data:
            if not self._outbox:
                self._loop.call_soon(_flush_all, self._outbox)
            self._outbox.append(self)
        self._data += data
        if len(self._data) > _GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        data, self._data = self._data, b""
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()


def _flush_all(outbox: list[_Writer]) -> None:
    writers = outbox[:]
    outbox.clear()
    for writer in writers:
        writer.flush()


class SocketProtocol(_Watched, WebSocketsSansIOProtocol):
    """WebSockets whose memory and patience are bounded, with the lane; the application can drop one at once.

    Attributes:
        on_frame: Set by the application: takes a frame to answer where it has been read, where that can be, and returns
            whether it has.
    """

    on_frame: Callable[[str | bytes], bool] | None = None
    _pong: bytes = b""
    _message: bytearray | None = None
    _plain: bool = False
    _between_frames: bool = False
    _control_frames: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn.debug = False  # it would log headers, and with them tokens
        if SAFE:
            self.queue = _ReceiveQueue()  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=0)
        self.transport = _Writer(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, with every timer."""
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        if self._plain and (frame := self._read_whole_frame(data)) is not None:
            # The application waits for it, so reading goes on.
            if self.on_frame is None or not self.writable.is_set() or not self.on_frame(frame):
                kind = "text" if isinstance(frame, str) else "bytes"
                self.queue.put_nowait({"type": "websocket.receive", kind: frame})  # type: ignore[arg-type]
            return
        self._between_frames = False
        self._control_frames = 0
        super().data_received(data)
        if not self.handshake_initiated:
            # The whole head was there, and the WebSocket library did not like it; its answer waits to be sent.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def _read_whole_frame(self, data: bytes) -> str | bytes | None:
        """Return the payload of a buffer that is exactly one whole frame that the application waits for; else None."""
        waiter = self.queue.waiter  # type: ignore[attr-defined]  # it is ours
        length = len(data)
        if waiter is None or waiter.done() or length < 2 + _MASK_BYTES or data[0] not in _WHOLE:
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
        if self.close_sent or self.conn.state is not State.OPEN:
            return None
        if not (self._between_frames or self._is_between_frames()):
            return None
        body = start + _MASK_BYTES
        try:
            payload = apply_mask(data[body:], data[start:body])
            return payload.decode() if data[0] == _WHOLE_TEXT else payload
        except UnicodeDecodeError:
            return None

    def _is_between_frames(self) -> bool:
        """Whether nothing is under way that a frame could belong to; noted until something goes the general way."""
        if self.conn.reader.buffer or self.frames or self._message is not None or not self.handshake_complete:
            return False
        # Of one whose head has been read nothing may be left in the buffer: where the parser stands tells whether what
        # comes is its payload.
        parser: Any = self.conn.parser
        while (inner := parser.gi_yieldfrom) is not None:
            parser = inner
        self._between_frames = parser.gi_code is StreamReader.at_eof.__code__
        return self._between_frames

    def send_frame(self, frame: str | bytes) -> bool:
        """Send a frame at once; False where it has to go the general way, by `send`."""
        if (
            not self._plain
            or not self.writable.is_set()
            or not self.handshake_complete
            or self.disconnected
            or self.close_sent
            or self.conn.state is not State.OPEN
        ):
            return False
        kind, payload = (_WHOLE_TEXT, frame.encode()) if isinstance(frame, str) else (_WHOLE_BINARY, frame)
        size = len(payload)
        if size < _SHORT:
            head = bytes((kind, size))
        elif size < 1 << 16:
            head = struct.pack("!BBH", kind, _SHORT, size)
        else:
            head = struct.pack("!BBQ", kind, _SHORT + 1, size)
        if kind == _WHOLE_TEXT and size < _GATHERED_BYTES:
            self.transport.write(head + payload)
        else:  # arrays of many sessions, which nothing follows in this turn: perhaps megabytes, not copied again
            self.transport.flush()
            self.transport.writelines((head, payload))
        return True

    def abort(self) -> None:
        """Drop the connection at once, with all unsent data."""
        self.transport.abort()

    async def send(self, message: Any) -> None:
        """Send a frame, or accept, refuse or close."""
        kind = message["type"]
        if kind == "websocket.send":
            text = message.get("text")
            if self.send_frame(message["bytes"] if text is None else text):
                return
        if self.close_sent and self.handshake_complete and kind in ("websocket.send", "websocket.close"):
            # A broken frame, or a client that answers no ping, has made the protocol close by itself, which the
            # application cannot know; to uvicorn that is a fault of the application.
            raise ClientDisconnected
        await super().send(message)

    def handle_connect(self, event: Request) -> None:
        """Start the application on a handshake."""
        super().handle_connect(event)
        if self.response.status_code == 101:
            self._plain = SAFE and not self.conn.extensions
            # The task that was made has not run yet.
            extensions: Any = self.scope["extensions"]
            extensions[LANE] = self

    def handle_cont(self, event: Frame) -> None:
        """Join a fragment to those before it, so that many small ones take no more room than one large one."""
        if self._message is None:
            self._message = bytearray(b"".join(self.frames))
            self.frames = []
        self._message += event.data
        if event.fin:
            self.frames = [bytes(self._message)]
            self._message = None
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """Hand over a message that is complete."""
        with suppress(InvalidState):  # it is no text, and the connection is closing already
            super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer, or, where the client does not read, keep the last answer only, as the standard allows."""
        if self._is_flooded():
            return
        if self.writable.is_set():
            super().handle_ping()
        else:
            self._pong = b"".join(self.conn.data_to_send())

    def handle_pong(self, event: Frame) -> None:
        """Note that the client is there."""
        if not self._is_flooded():
            super().handle_pong(event)

    def _is_flooded(self) -> bool:
        """Count a ping or a pong; drop the connection that brings too many at once."""
        self._control_frames += 1
        if self._control_frames == MAX_CONTROL_FRAMES + 1:
            self.transport.abort()
        return self._control_frames > MAX_CONTROL_FRAMES

    def resume_writing(self) -> None:
        """All is sent."""
        super().resume_writing()
        if self._pong:
            pong, self._pong = self._pong, b""
            self.transport.write(pong)
