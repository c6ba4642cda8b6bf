"""Transport of a session over a WebSocket, with `picows`."""

import asyncio
import atexit
import base64
import logging
import os
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from weakref import WeakSet

import picows
from picows import WSCloseCode, WSFrame, WSMsgType, WSTransport

from openenv_core.client.carrier import Carrier, refusal, unreachable_error
from openenv_core.client.settings import ClientSettings
from openenv_core.errors import ClientError, ConnectionLostError
from openenv_core.protocol.batch import SUBPROTOCOL
from openenv_core.protocol.frames import detail_text
from openenv_core.protocol.http import DETERMINISTIC, DETERMINISTIC_HEADER, redact_url
from openenv_core.proxies import proxy_for

MAX_REDIRECTS: Final = 5

LINGER_S: Final = 1.0
"""Seconds for a server to confirm the close of an aborted connection."""

CLOCK_TOLERANCE_S: Final = 0.05
"""Error, in seconds, of the kernel's time of the last received data: its ticks are coarser than a loopback reply."""

_LAST_DATA_RECEIVED: Final = struct.Struct("=52xI")
"""Milliseconds since the last received data (`tcpi_last_data_recv`), in Linux's `tcp_info`."""

_TEXT, _BINARY = WSMsgType.TEXT, WSMsgType.BINARY
_CONTINUATION, _CLOSE = WSMsgType.CONTINUATION, WSMsgType.CLOSE
_RESET_HINT: Final = "call reset() to start a new session"
_GOING_AWAY = (WSCloseCode.GOING_AWAY, WSCloseCode.SERVICE_RESTART)

# Our errors say what picows logs; without a handler it would also be printed to stderr.
_logger = logging.getLogger("openenv_core.client.socket")
_logger.addHandler(logging.NullHandler())


class WebSocketCarrier(Carrier, picows.WSListener):
    """One WebSocket. Without compression: frames are small and latency counts.

    Attributes:
        v1: The server speaks `ropewalk.v1`.
    """

    def __init__(self, settings: ClientSettings) -> None:
        super().__init__()
        self._settings = settings
        self._max_bytes = settings.max_message_bytes
        self.v1 = False
        self._transport: WSTransport | None = None
        self._disconnected = self._loop.create_future()
        self._message_parts: bytearray | None = None
        self._text = True
        self._has_received = True  # since `_keep_alive` has looked
        self._keepalive: asyncio.Task[None] | None = None
        self._linger_task: asyncio.Task[Any] | None = None

    # Carrier

    def send(self, frame: bytes, *, binary: bool = False) -> None:
        """Send one frame; text is UTF-8."""
        if self._transport is not None:
            self._transport.send(_BINARY if binary else _TEXT, frame)

    async def close(self) -> None:
        """Close in order, within `connect_timeout_s`."""
        if self._disconnected.done():
            return
        transport = self._transport
        assert transport is not None
        self._mark_lost(ConnectionLostError("the connection was closed by this client"))
        try:
            transport.send_close(WSCloseCode.OK)
            async with asyncio.timeout(self._settings.connect_timeout_s):
                await asyncio.shield(self._disconnected)
        except TimeoutError:
            transport.disconnect(graceful=False)
        finally:
            self.abort()

    def abort(self) -> None:
        """Send a close, and disconnect in the background; at once if the connection is broken.

        A server that does not read the close keeps the session for the client to resume. So the socket stays open until
        the server confirms, or `LINGER_S`: unread data in a closed socket resets the connection, and the close is lost.
        """
        self._mark_lost(ConnectionLostError("the connection was broken off by this client"))
        transport = self._transport
        if transport is None or transport.is_disconnected or self._linger_task is not None:
            return
        if self.broken:
            transport.disconnect(graceful=False)
            return
        transport.send_close(WSCloseCode.OK)
        self._linger_task = self._loop.create_task(asyncio.wait([self._disconnected], timeout=LINGER_S))
        # Also if the event loop ends before the task has begun.
        self._linger_task.add_done_callback(lambda _: transport.disconnect(graceful=False))

    # Callbacks of picows

    def on_ws_connected(self, transport: WSTransport) -> None:
        """Keep the transport, and start the keepalive."""
        self._transport = transport
        if (interval_s := self._settings.websocket_ping_interval_s) is not None:
            self._keepalive = self._loop.create_task(self._keep_alive(transport, interval_s))

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        """Handle a frame, whose memory is valid until this returns."""
        self._has_received = True
        kind = frame.msg_type
        if self._lost_error is not None and kind is not _CLOSE:
            return  # messages after one that was cut off are ignored
        if kind is _TEXT or kind is _BINARY:
            if frame.payload_size > self._max_bytes:
                # picows refuses it, but delivers it nevertheless if it is complete before the disconnect.
                self._mark_lost(ConnectionLostError(_close_reason(transport)))
                return
            if self._message_parts is not None:
                raise self._protocol_error(WSCloseCode.PROTOCOL_ERROR, "a new message inside of another")
            if frame.fin and kind is _TEXT:
                self._on_frame(frame.get_payload_as_bytes())
                return
            data = bytearray(frame.get_payload_as_memoryview())
            if frame.fin:
                self._on_frame(data)
            else:
                self._message_parts, self._text = data, kind is _TEXT
        elif kind is _CONTINUATION:
            if self._message_parts is None:
                raise self._protocol_error(WSCloseCode.PROTOCOL_ERROR, "the continuation of nothing")
            if len(self._message_parts) + frame.payload_size > self._max_bytes:
                raise self._protocol_error(
                    WSCloseCode.MESSAGE_TOO_BIG, f"a message of more than {self._max_bytes} bytes"
                )
            self._message_parts += frame.get_payload_as_memoryview()
            if frame.fin:
                parts, self._message_parts = self._message_parts, None
                self._on_frame(bytes(parts) if self._text else parts)
        elif kind is _CLOSE:
            unanswered = frame.payload_size and frame.get_close_code() is WSCloseCode.INTERNAL_ERROR  # a ping
            self._mark_lost(ConnectionLostError(_close_reason(transport)), broken=bool(unanswered))
            transport.send_close(frame.get_close_code() if frame.payload_size else WSCloseCode.OK)
            transport.disconnect()

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        """Record the end of the connection."""
        if self._keepalive is not None:
            self._keepalive.cancel()
        self._mark_lost(ConnectionLostError(_close_reason(transport)), broken=True)
        if not self._disconnected.done():
            self._disconnected.set_result(None)
        # picows keeps a protocol violation as an exception that has to be retrieved.
        handshake = transport.close_handshake
        if handshake is not None and handshake.sent is not None and handshake.sent.code != WSCloseCode.OK:
            self._disconnect_task = self._loop.create_task(_await_disconnect(transport))

    def pause_writing(self) -> None:
        """Hold frames back: the server does not read."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """Accept frames again."""
        self.write_paused = False
        if self._listener is not None:
            self._listener.on_writable()

    # Internals

    def _protocol_error(self, code: WSCloseCode, problem: str) -> picows.WSProtocolError:
        """Report the connection as lost; return the exception with which picows closes it."""
        self._mark_lost(ConnectionLostError(_violation_text(problem)))
        return picows.WSProtocolError(code, problem)

    async def _keep_alive(self, transport: WSTransport, interval_s: float) -> None:
        """Ping the server after each interval of silence; the connection is lost if it does not answer in time."""
        timeout_s = self._settings.websocket_ping_timeout_s
        while self._lost_error is None:
            self._has_received = False
            await asyncio.sleep(interval_s)
            if self._has_received:
                continue
            transport.send_ping()
            pinged_at = self._loop.time()
            if timeout_s is None:
                continue
            await asyncio.sleep(timeout_s)
            if not self._has_received and not self._is_receiving(transport, pinged_at):
                problem = f"expected the server to answer a ping within {timeout_s:g} s, got nothing"
                error = ConnectionLostError(f"{problem}: it is gone, or cut off; {_RESET_HINT}")
                self._mark_lost(error, broken=True)
                self.abort()

    def _is_receiving(self, transport: WSTransport, pinged_at: float) -> bool:
        """Whether bytes have arrived since the ping that are not a whole frame yet.

        They are part of a long message ahead of the pong; or the pong itself, unread because the thread was busy: not
        every event loop reads its sockets before it runs its timers.
        """
        if sys.platform != "linux":
            return False
        raw = transport.underlying_transport.get_extra_info("socket")
        try:
            with socket.socket(fileno=os.dup(raw.fileno())) as duplicate:
                info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECEIVED.size)
            (silence_ms,) = _LAST_DATA_RECEIVED.unpack(info)
        except (OSError, struct.error):  # not a TCP connection, or an old kernel
            return False
        return bool(silence_ms / 1000 < self._loop.time() - pinged_at + CLOCK_TOLERANCE_S)


async def open_socket(url: str, settings: ClientSettings) -> WebSocketCarrier:
    """Connect to a ws:// or wss:// URL, and offer `ropewalk.v1`.

    Raises:
        AuthenticationError: The server requires a token, or refuses the given one.
        AccessRefusedError: The server refuses the host name or the origin.
        CapacityError: The server is full.
        ConnectionFailedError: Nothing answered in time, or what answered is not a WebSocket server.
    """
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            target = url
            for _ in range(MAX_REDIRECTS):
                try:
                    return await _connect(target, settings)
                except picows.WSInvalidStatusError as error:
                    target = _redirect_target(target, error)
            raise unreachable_error(url, f"more than {MAX_REDIRECTS} redirects")
    except TimeoutError:
        raise unreachable_error(url, f"no answer within {settings.connect_timeout_s:g} s") from None
    except ClientError:
        raise
    except Exception as error:  # network, TLS and proxy errors: each library raises its own types
        cause = error if isinstance(error, ConnectionRefusedError) else None
        raise unreachable_error(url, str(error) or type(error).__name__) from cause


async def _connect(url: str, settings: ClientSettings) -> WebSocketCarrier:
    url, headers = _extract_credentials(url, settings.request_headers)
    headers["Sec-WebSocket-Protocol"] = SUBPROTOCOL
    opened: list[socket.socket] = []

    async def open_tcp(address: picows.WSParsedURL) -> socket.socket:
        opened.append(await _connect_tcp(address.host, address.port, settings.connect_timeout_s))
        return opened[0]

    try:
        transport, carrier = await picows.ws_connect(
            lambda: WebSocketCarrier(settings),
            url,
            logger_name=_logger,
            websocket_handshake_timeout=None,  # the caller has a deadline
            enable_auto_ping=False,  # picows requires both settings, and a timeout shorter than the interval
            max_frame_size=settings.max_message_bytes,
            extra_headers=headers,
            max_redirects=0,
            proxy=proxy_for(url),
            socket_factory=open_tcp,
            use_aiofastnet=False,
        )
    except BaseException:
        for raw in (
            opened
        ):  # picows leaves it open if its handshake is cancelled; at the end of the stream it closes
            with suppress(OSError):
                raw.shutdown(socket.SHUT_RDWR)
        raise
    if not isinstance(carrier, WebSocketCarrier):
        raise ConnectionError("the connection was closed before it was answered")
    carrier.v1 = transport.response.headers.get("Sec-WebSocket-Protocol") == SUBPROTOCOL
    carrier.deterministic = transport.response.headers.get(DETERMINISTIC_HEADER) == DETERMINISTIC
    _open.add(carrier)
    return carrier


_open: Final = WeakSet[WebSocketCarrier]()
_CLOSE_FRAME: Final = b"\x88\x82\x00\x00\x00\x00\x03\xe8"
"""A client's close frame: code 1000, masked with zeros."""


def _close_all() -> None:
    """Close all connections at the process's exit, or the servers would keep their sessions for resuming.

    The event loops have ended, so the frame is written to the socket itself, unless it is encrypted.
    """
    for carrier in _open:
        if carrier._transport is None or carrier._transport.is_disconnected:
            continue
        underlying = carrier._transport.underlying_transport
        if underlying.get_extra_info("ssl_object") is None:
            with suppress(OSError, TypeError):
                os.write(underlying.get_extra_info("socket").fileno(), _CLOSE_FRAME)


atexit.register(_close_all)
os.register_at_fork(after_in_child=_open.clear)


async def _connect_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a socket connected to the host's first address that answers; OSError if none does.

    The time is divided among the addresses, so that an unreachable one leaves time for the next.
    """
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in addresses:
        raw = socket.socket(family, kind, protocol)
        raw.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s / len(addresses)):
                await loop.sock_connect(raw, address)
            return raw
        except BaseException as error:
            raw.close()
            if not isinstance(error, OSError):  # TimeoutError is one
                raise
            failure = error
    raise failure or OSError(f"no address of {host!r}")


def _extract_credentials(url: str, headers: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Move the URL's user and password, if any, into an Authorization header."""
    parts = urlsplit(url)
    merged = dict(headers)
    if parts.username is None:
        return url, merged
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    if not any(name.lower() == "authorization" for name in merged):
        merged["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])), merged


def _redirect_target(url: str, error: picows.WSInvalidStatusError) -> str:
    """Return where a response redirects to on the same host; other hosts must not get the headers.

    Raises:
        ClientError: The response is not a redirect, or one to another host.
    """
    response = error.response
    assert response is not None
    status, location = int(response.status), response.headers.get("Location")
    if not 300 <= status < 400 or location is None:
        detail = detail_text(error.raw_body) if error.raw_body else ""
        raise refusal(url, status, response.headers, detail, socket=True) from None
    requested, target = urlsplit(url), urlsplit(urljoin(url, location))
    scheme = {"http": "ws", "https": "wss"}.get(target.scheme, target.scheme)
    if target.hostname != requested.hostname or scheme not in (requested.scheme, "wss"):
        named = redact_url(urlunsplit(target))
        raise unreachable_error(url, f"a redirect to {named}; use that URL if you trust it") from None
    return urlunsplit(target._replace(scheme=scheme, fragment=""))


def _close_reason(transport: WSTransport) -> str:
    """Return a message that says how the connection ended."""
    handshake = transport.close_handshake
    sent, recv = (None, None) if handshake is None else (handshake.sent, handshake.recv)
    if handshake is not None and sent is not None and not handshake.recv_then_sent:
        return _violation_text(sent.reason)
    if recv is None:
        return (
            f"expected a reply, but the connection is closed (it broke without a close frame); {_RESET_HINT}"
        )
    # An IntEnum, whatever the stubs say; unknown codes become members as well.
    code = "without a code" if recv.code is WSCloseCode.NO_INFO else f"close code {int(recv.code.value)}"
    code_text = f"({code}{f': {recv.reason}' if recv.reason else ''})"
    if recv.code in _GOING_AWAY:
        hint = f"{_RESET_HINT}, on another server or when this one is back"
        return f"expected a reply, but the server is going away {code_text}; {hint}"
    return f"expected a reply, but the server closed the connection {code_text}; {_RESET_HINT}"


def _violation_text(problem: str) -> str:
    return (
        f"expected valid WebSocket messages within max_message_size_mb, got {problem}; "
        "the session is over, call reset() to start a new one"
    )


async def _await_disconnect(transport: WSTransport) -> None:
    with suppress(Exception):
        await transport.wait_disconnected()
