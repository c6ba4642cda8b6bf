"""uvicorn's HTTP and WebSocket protocols, with the limits that a server open to strangers needs, and a fast path.

uvicorn waits forever for a request that never ends and for a client that never reads, answers pings without
limit, and keeps an object for every fragment of a message. The limits cost nothing for a message that arrives whole
and is read: timers run only while a request's head is incomplete or a reply is unread.

Nearly every frame of the OpenEnv wire is unfragmented and arrives in one piece while the application waits for it.
uvicorn passes such a frame through a generator-based parser, two events, a queue and, before and after, a system call
that pauses and resumes reading. The fast path decodes it directly from the buffer, and has the application answer it
there if that waits for nothing, or only for a thread. Every other frame takes the slow path, as if there were no
fast one.
"""

import asyncio
import functools
import logging
import os
import resource
import socket
import struct
from contextlib import suppress
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

from servers.routes.connection import FAST_PATH_EXTENSION, Connection, Receive, Send

try:
    from websockets.speedups import apply_mask
except ImportError:  # a build without compiled parts
    from websockets.utils import apply_mask

PING_INTERVAL_S: Final = 20.0
"""Seconds between pings on a WebSocket. They keep proxies from closing it as idle during long computations."""

PEER_GONE_AFTER_S: Final = 40.0
"""Seconds without a TCP acknowledgement after which the connection is dropped."""

PONG_TIMEOUT_S: Final = 300.0
"""Seconds that a reachable client may leave a ping unanswered: its event loop may be busy."""

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: 57\r\n\r\n"
    b'{"detail":"expected a free connection; try again later"}\n'
)


_log = logging.getLogger("uvicorn.error")
# Otherwise each invalid frame from a client logs a traceback; the connection is closed with status 1007 in any case.
_log.addFilter(lambda record: record.msg != "Invalid UTF-8 sequence received from client.")


def raise_descriptor_limit() -> None:
    """Raise the limit on open files to the hard limit: the usual soft limit allows only 1,024 connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@functools.cache
def connection_limit() -> int:
    """Return how many connections a process accepts; a sixteenth of its descriptors is reserved for other uses."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - max(64, soft // 16)


def _tune(transport: asyncio.Transport) -> None:
    """Set a connection's TCP options.

    TCP_NODELAY: a response's head and body are two writes, and the second must not wait for the acknowledgement of the
    first. asyncio sets it only for sockets whose protocol is TCP by name, which inherited listeners' are not.

    TCP_USER_TIMEOUT: data that stays unacknowledged breaks the connection. The client's kernel acknowledges even if
    its process is busy, so this detects an unreachable machine, while `PONG_TIMEOUT_S` can allow for a trainer that
    computes for minutes.
    """
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(PEER_GONE_AFTER_S * 1000)
            )


class _UnreadTimeoutProtocol(asyncio.Protocol):
    """A protocol that drops clients that do not read: a timer runs while data is unsent."""

    unread_timeout_s: float = 30.0
    """Seconds without progress after which a client that does not read is dropped."""

    transport: Any
    _unread_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Start the timer."""
        super().pause_writing()
        if self._unread_timer is None:
            self._start_unread_timer(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop the timer: all data is sent."""
        super().resume_writing()
        self._stop_unread_timer()

    def _start_unread_timer(self, unsent: int) -> None:
        loop = asyncio.get_running_loop()
        self._unread_timer = loop.call_later(self.unread_timeout_s, self._check_unread, unsent)

    def _check_unread(self, last_unsent: int) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent >= last_unsent:
            self.transport.abort()
        elif unsent:  # slow, but reading
            self._start_unread_timer(unsent)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


class HttpProtocol(_UnreadTimeoutProtocol, H11Protocol):
    """HTTP/1.1 with timeouts for slow requests and unread responses, and a limit on connections."""

    head_timeout_s: float = 10.0
    """Seconds from the start of a connection, or the first byte of a later request, to the end of its headers."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set the connection up, or refuse it if there are too many."""
        if len(self.connections) >= connection_limit():
            self.transport = transport
            transport.write(_BUSY)
            transport.close()
            return
        # With 0, `pause_writing` is called for any amount of unsent data.
        transport.set_write_buffer_limits(high=0)
        _tune(transport)
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._stop_head_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Parse received data, with a timer until the request's head is complete."""
        if self.conn.their_state is h11.IDLE:
            self._unset_keepalive_if_required()
            if self._head_timer is None:
                self._start_head_timer()
        # In any other state the keep-alive timer may run, after a response that was sent before its request ended. A
        # body that still trickles in must not stop it.
        self.conn.receive_data(data)
        self.handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Switch to the WebSocket protocol."""
        self._stop_head_timer()
        self._stop_unread_timer()  # for the response to an earlier request; the next protocol has its own timer
        if any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        ):
            self.send_400_response("expected a WebSocket handshake without a body, got one with a body\n")
            return
        super().handle_websocket_upgrade(event)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


_OPEN: Final = State.OPEN
"""For speed: CPython 3.11 takes as long for a member of an enum as for two calls."""

_WHOLE_TEXT: Final = 0x81
"""First byte of a frame: final fragment, no extension bits, text."""
_WHOLE_BINARY: Final = 0x82
_WHOLE: Final = (_WHOLE_TEXT, _WHOLE_BINARY)
_MASKED: Final = 0x80
_SHORT: Final = 126
_MASK_BYTES: Final = 4

_CONTROL: Final = 8
"""Opcodes from here on are those of control frames, which may come between the fragments of a message."""


def _wire_size(frame: Frame) -> int:
    """Return the size of a client's frame as it was sent, at least: a client may encode a length in more bytes."""
    size = len(frame.data)
    return 2 + (0 if size < _SHORT else 2 if size < 1 << 16 else 8) + _MASK_BYTES + size


_EVENTS_PER_YIELD: Final = 16
"""Events of one connection that the application receives before the event loop is yielded to others."""


class _ReceiveQueue:
    """Events for the application, in a few hundred bytes; `asyncio.Queue` takes thousands.

    The protocol bounds the number of events, since it pauses reading. One read may bring thousands of small frames,
    which an application that waits for nothing else would receive without yielding to other tasks; so `get` yields.
    """

    __slots__ = ("_events", "_events_since_yield", "waiter")

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._events_since_yield = 0  # events since the last yield
        self.waiter: asyncio.Future[None] | None = None

    def put_nowait(self, event: Any) -> None:
        self._events.append(event)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def get(self) -> Any:
        """Wait for the next event; for one caller at a time."""
        self._events_since_yield += 1
        if self._events_since_yield > _EVENTS_PER_YIELD:
            self._events_since_yield = 1
            await asyncio.sleep(0)
        while not self._events:
            self._events_since_yield = 1
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        return self._events.pop(0)

    def empty(self) -> bool:
        return not self._events


MAX_CONTROL_FRAMES: Final = 256
"""Pings and pongs that one read may bring before the connection is dropped as a flood."""


_MAX_BUFFERED_BYTES: Final = 16 * 1024
"""Bytes of one connection that may be buffered until the end of the event loop's iteration."""


_outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, list["_Writer"]] = WeakKeyDictionary()


class _Writer:
    """A transport that buffers writes until the end of the event loop's iteration, and otherwise delegates.

    A write wakes the client's process, which falls asleep again if some work passes before the next write; that wake-up
    is the larger half of a short reply's cost. So all connections' writes of one iteration are sent together.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.data = b""
        self._loop = asyncio.get_running_loop()
        self._outbox = _outboxes.setdefault(self._loop, [])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def write(self, data: bytes) -> None:
        """Write at the end of the iteration; write large data at once, so that unread data is noticed."""
        if not self.data:
            if not self._outbox:
                self._loop.call_soon(_flush_all, self._outbox)
            self._outbox.append(self)
        self.data += data
        if len(self.data) > _MAX_BUFFERED_BYTES:
            self.flush()

    def flush(self) -> None:
        data, self.data = self.data, b""
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        self.flush()
        self.transport.close()


def _flush_all(outbox: list[_Writer]) -> None:
    writers = outbox[:]
    outbox.clear()
    for writer in writers:
        data, writer.data = writer.data, b""
        if data and not writer.transport.is_closing():  # `flush`, inlined for speed
            writer.transport.write(data)


class FastConnection(Connection):
    """An accepted WebSocket of `ropewalk serve`: whole frames pass by our own protocol, beside ASGI."""

    _sends_in_reader = False

    def __init__(
        self, receive: Receive, send: Send, send_timeout_s: float, protocol: "SocketProtocol"
    ) -> None:
        super().__init__(receive, send, send_timeout_s, protocol.abort)
        self._protocol = protocol

    def start(self) -> asyncio.Task[None]:
        """Begin to read."""
        self._protocol.connection = self
        return super().start()

    def send(self, frame: str | bytes) -> None:
        """Send a frame after those before it, at once if the client reads."""
        if self.is_sending or self._outbox or self.closing or not self._protocol.send_frame(frame):
            super().send(frame)

    def stop(self) -> None:
        """Stop reading."""
        self._protocol.connection = None
        super().stop()


class SocketProtocol(_UnreadTimeoutProtocol, WebSocketsSansIOProtocol):
    """WebSockets with limits on memory and time, and the fast path; the application can `abort` one.

    Attributes:
        connection: Takes whole frames at once, if the application has asked for that.
    """

    connection: FastConnection | None = None
    _pong: bytes = b""
    _message: bytearray | None = None
    _fast_path: bool = False
    _control_frames: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn.debug = False  # would log headers, including tokens
        self.queue = _ReceiveQueue()  # type: ignore[assignment]
        self._unparsed_bytes = 0  # of a frame that has not ended; more if its client wastes bytes on lengths
        self._in_message = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wrap the transport in a `_Writer`."""
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=0)
        self.transport = _Writer(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers; report a close that the client sent before it reset the connection."""
        self._stop_unread_timer()
        if isinstance(exc, ConnectionError) and self.handshake_complete and not self.close_sent:
            self._read_last_close()
        super().connection_lost(exc)

    def _read_last_close(self) -> None:
        """Look for a close in the data that is left unread since a write has failed; other frames are dropped.

        Without it the application would take the end for a break, and keep sessions for a client that has ended them.
        """
        with suppress(OSError, RuntimeError):
            fd = self.transport.get_extra_info("socket").fileno()
            while data := os.read(fd, _MAX_BUFFERED_BYTES):
                self.conn.receive_data(data)
        if (close := self.conn.close_rcvd) is not None:
            message: Any = {"type": "websocket.disconnect", "code": close.code, "reason": close.reason}
            self.queue.put_nowait(message)

    def data_received(self, data: bytes) -> None:
        """Pass on `data` at once if it is exactly one whole frame, and the application waits for it; else parse it."""
        waiter = self.queue.waiter  # type: ignore[attr-defined]  # a `_ReceiveQueue`
        length = len(data)
        if (
            not self._fast_path
            or waiter is None
            or waiter.done()
            or length < 2 + _MASK_BYTES
            or data[0] not in _WHOLE
            or self._unparsed_bytes
            or self._in_message
            or self.close_sent
            or self.conn.state is not _OPEN
        ):
            self._parse(data)
            return
        size, start = data[1] - _MASKED, 2
        if size == _SHORT:
            size, start = data[2] << 8 | data[3], 4
        elif size > _SHORT:
            size = -1  # a length of eight bytes
        body = start + _MASK_BYTES
        if size < 0 or length != body + size:
            self._parse(data)
            return
        payload = apply_mask(data[body:], data[start:body])
        frame: str | bytes = payload
        if data[0] == _WHOLE_TEXT:
            try:
                frame = payload.decode()
            except UnicodeDecodeError:
                self._parse(data)
                return
        connection = self.connection
        # The application waits for the frame, so reading need not be paused.
        if (
            connection is None
            or connection.is_sending
            or connection.paused is not None
            or connection.closing
            or not self.writable.is_set()
        ):
            kind = "text" if isinstance(frame, str) else "bytes"
            self.queue.put_nowait({"type": "websocket.receive", kind: frame})  # type: ignore[arg-type]
            return
        try:
            connection.on_frame(frame)
        except Exception:
            connection.on_error()

    def _parse(self, data: bytes) -> None:
        """Pass data through uvicorn's parser, as if there were no fast path."""
        # A client's first bytes are its handshake, which it may not follow with frames before the response.
        self._unparsed_bytes += len(data if self.handshake_initiated else data.partition(b"\r\n\r\n")[2])
        self._control_frames = 0
        super().data_received(data)
        if not self.handshake_initiated:
            # The head was complete and the WebSocket library refused it; its response is still unsent.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def handle_events(self) -> None:
        """Handle what the parser has found, and note whether the next byte begins a message."""
        for event in self.conn.events:
            if isinstance(event, Frame):
                self._unparsed_bytes -= _wire_size(event)
                if event.opcode < _CONTROL:
                    self._in_message = not event.fin
        super().handle_events()

    def send_frame(self, frame: str | bytes) -> bool:
        """Write a frame directly; return False if it has to take the slow path, by `send`."""
        if (
            not self._fast_path
            or not self.writable.is_set()
            or not self.handshake_complete
            or self.disconnected
            or self.close_sent
            or self.conn.state is not _OPEN
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
        if kind == _WHOLE_TEXT and size < _MAX_BUFFERED_BYTES:
            self.transport.write(head + payload)
        else:  # arrays of many sessions, perhaps megabytes: not worth a copy, and nothing follows in this iteration
            self.transport.flush()
            self.transport.writelines((head, payload))
        return True

    def connect(self, receive: Receive, send: Send, send_timeout_s: float) -> FastConnection:
        """Return the connection that passes whole frames beside ASGI."""
        return FastConnection(receive, send, send_timeout_s, self)

    def abort(self) -> None:
        """Drop the connection at once, with all unsent data."""
        self.transport.abort()

    async def send(self, message: Any) -> None:
        """Send a frame, or accept, refuse or close the WebSocket."""
        kind = message["type"]
        if kind == "websocket.send":
            text = message.get("text")
            if self.send_frame(message["bytes"] if text is None else text):
                return
        if self.close_sent and self.handshake_complete and kind in ("websocket.send", "websocket.close"):
            # An invalid frame or an unanswered ping has made the protocol close the connection. The application cannot
            # know that, but uvicorn would treat its message as an error of the application.
            raise ClientDisconnected
        await super().send(message)

    def handle_connect(self, event: Request) -> None:
        """Start the application on a handshake request, which it then accepts or refuses."""
        super().handle_connect(event)
        if self.response.status_code == 101:
            self._fast_path = not self.conn.extensions
            # The application's task has been created but has not run yet, so it finds this in its scope.
            extensions: Any = self.scope["extensions"]
            extensions[FAST_PATH_EXTENSION] = self

    def handle_cont(self, event: Frame) -> None:
        """Append a fragment to the message, so that many small ones take no more memory than one large one."""
        if self._message is None:
            self._message = bytearray(b"".join(self.frames))
            self.frames = []
        self._message += event.data
        if event.fin:
            self.frames = [bytes(self._message)]
            self._message = None
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """Pass a complete message to the application."""
        with suppress(InvalidState):  # invalid UTF-8, and the connection is closing already
            super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer a ping; if the client does not read, keep only the latest pong, as the standard allows."""
        if self._is_flooded():
            return
        if self.writable.is_set():
            super().handle_ping()
        elif pongs := b"".join(self.conn.data_to_send()):  # of all pings of one read, at the first of them
            self._pong = pongs

    def handle_pong(self, event: Frame) -> None:
        """Handle a pong, unless there are too many."""
        if not self._is_flooded():
            super().handle_pong(event)

    def _is_flooded(self) -> bool:
        """Count a ping or pong; drop the connection if one read brings too many."""
        self._control_frames += 1
        if self._control_frames == MAX_CONTROL_FRAMES + 1:
            self.transport.abort()
        return self._control_frames > MAX_CONTROL_FRAMES

    def resume_writing(self) -> None:
        """Send the pong that was kept, if any."""
        super().resume_writing()
        if self._pong:
            pong, self._pong = self._pong, b""
            self.transport.write(pong)
