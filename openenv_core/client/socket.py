"""The seam between a client and the library that carries its frames.

A client asks for four things: connect, send, receive, close. Another library is another file like this.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from openenv_core.errors import ConnectionFailed, ConnectionLost

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """How a socket is opened and kept.

    Attributes:
        connect_timeout_s: Seconds until an attempt to connect is given up.
        max_message_bytes: The longest message that is received.
        ping_interval_s: Seconds between keepalive pings; None sends none.
        ping_timeout_s: Seconds until a missing pong breaks the connection; None waits for ever.
        headers: Further headers of the opening request.
    """

    connect_timeout_s: float
    max_message_bytes: int
    ping_interval_s: float | None
    ping_timeout_s: float | None
    headers: Mapping[str, str] = field(default_factory=dict)


class Socket(Protocol):
    """Carries text frames. Each method but `abort` raises ConnectionLost once the connection has broken."""

    async def send(self, frame: bytes) -> None:
        """Send one text frame, given as UTF-8."""

    async def recv(self) -> bytes:
        """Return the next frame. Cancelling the wait loses nothing."""

    async def close(self) -> None:
        """Close in order, within the time that was allowed for connecting."""

    def abort(self) -> None:
        """Break the connection at once."""


class WebSocketsSocket:
    """A socket over the `websockets` library, without compression: frames are small and latency counts."""

    __slots__ = ("_connection",)

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def send(self, frame: bytes) -> None:
        """Send one text frame, given as UTF-8."""
        try:
            await self._connection.send(frame, text=True)
        except ConnectionClosed as error:
            raise ConnectionLost(_lost(error)) from None

    async def recv(self) -> bytes:
        """Return the next frame. Cancelling the wait loses nothing."""
        try:
            return await self._connection.recv(decode=False)
        except ConnectionClosed as error:
            raise ConnectionLost(_lost(error)) from None

    async def close(self) -> None:
        """Close in order."""
        await self._connection.close()

    def abort(self) -> None:
        """Break the connection at once."""
        self._connection.transport.abort()


async def open_socket(url: str, options: SocketOptions) -> Socket:
    """Connect to a ws:// or wss:// URL.

    Raises:
        ConnectionFailed: Nothing answered there in time, or not as a WebSocket server does.
    """
    proxy = {"proxy": None} if (urlsplit(url).hostname or "") in _LOOPBACK else {}
    try:
        connection = await connect(
            url,
            compression=None,
            open_timeout=options.connect_timeout_s,
            close_timeout=options.connect_timeout_s,
            max_size=options.max_message_bytes,
            ping_interval=options.ping_interval_s,
            ping_timeout=options.ping_timeout_s,
            additional_headers=options.headers,
            **proxy,  # type: ignore[arg-type]
        )
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
        reason = str(error) or f"no answer within {options.connect_timeout_s:g} s"
        raise ConnectionFailed(
            f"expected an OpenEnv server at {url}, got: {reason}; "
            "check that it runs and that the URL is right"
        ) from error
    return WebSocketsSocket(connection)


def _lost(error: ConnectionClosed) -> str:
    return f"expected a reply, but the connection is closed ({error}); call reset() to start a new session"
