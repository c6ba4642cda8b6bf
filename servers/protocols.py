"""uvicorn's two protocols, with the bounds that a server needs which strangers can reach.

uvicorn waits for ever for a request that never ends and for a client that never reads, answers pings without
limit, and keeps one object for every fragment of a message. Nothing here is done for a message that comes
whole and is read: timers run while a request's head is incomplete or a reply lies unread.
"""

import asyncio
import functools
import logging
import resource
import socket
from contextlib import suppress
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame
from websockets.http11 import Request

from servers.lane import FastLane
from servers.routes.connection import ABORT

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


class _Unread:
    """Drops a client that does not read: a timer that runs while something lies unsent."""

    __slots__ = ("_seen", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport, patience_s: float) -> None:
        self._transport = transport
        self._seen = transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(patience_s, self._look, patience_s)

    def close(self) -> None:
        self._timer.cancel()

    def _look(self, patience_s: float) -> None:
        unsent = self._transport.get_write_buffer_size()
        if not unsent:
            return
        if unsent >= self._seen:
            self._transport.abort()
            return
        self._seen = unsent  # it is slow, but it reads
        self._timer = asyncio.get_running_loop().call_later(patience_s, self._look, patience_s)


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
    """A protocol that watches what lies unsent."""

    unread_s: float = 30.0
    """Seconds without progress after which a client that does not read is dropped."""

    transport: Any
    _unread: _Unread | None = None

    def pause_writing(self) -> None:
        """Watch from now on."""
        super().pause_writing()
        if self._unread is None:
            self._unread = _Unread(self.transport, self.unread_s)

    def resume_writing(self) -> None:
        """All is sent."""
        super().resume_writing()
        self._has_read()

    def _has_read(self) -> None:
        if self._unread is not None:
            self._unread.close()
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
        self._has_read()
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
        self._has_read()  # the response to an earlier request; the next protocol watches from here
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


class SocketProtocol(_Watched, FastLane):
    """WebSockets whose memory and patience are bounded; the application can drop one at once."""

    _pong: bytes = b""
    _message: bytearray | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn.debug = False  # it would log headers, and with them tokens

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=0)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, with every timer."""
        self._has_read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        super().data_received(data)
        if not self.handshake_initiated:
            # The whole head was there, and the WebSocket library did not like it; its answer waits to be sent.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def handle_connect(self, event: Request) -> None:
        """Start the application on a handshake."""
        super().handle_connect(event)
        if self.response.status_code == 101:
            # The task that was made has not run yet.
            extensions: Any = self.scope["extensions"]
            extensions[ABORT] = self.transport.abort

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

    def _between_frames(self) -> bool:
        return self._message is None and super()._between_frames()

    def send_receive_event_to_app(self) -> None:
        """Hand over a message that is complete."""
        with suppress(InvalidState):  # it is no text, and the connection is closing already
            super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer, or, where the client does not read, keep the last answer only, as the standard allows."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self._pong = b"".join(self.conn.data_to_send())

    def resume_writing(self) -> None:
        """All is sent."""
        super().resume_writing()
        if self._pong:
            pong, self._pong = self._pong, b""
            self.transport.write(pong)
