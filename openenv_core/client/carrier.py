"""The interface between a session and its transport: WebSocket or plain HTTP."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from openenv_core.errors import (
    AccessRefusedError,
    AuthenticationError,
    CapacityError,
    ClientError,
    ConnectionFailedError,
    FactoryError,
    RequestTimeoutError,
    SessionError,
)
from openenv_core.protocol.errors import CAPACITY_REACHED
from openenv_core.protocol.http import redact_url, retry_after

SESSION_ENDED: Final = (CapacityError, FactoryError, SessionError)
"""Errors that end the session they are sent in."""


class StuckError(RequestTimeoutError):
    """A request was not sent, since none of the last ones was answered before its caller left."""


class Listener(Protocol):
    """Callbacks of a carrier."""

    def on_frame(self, frame: bytes | bytearray) -> None:
        """Handle a received frame: text as bytes, binary as a bytearray."""

    def on_writable(self) -> None:
        """Handle that frames can be sent again."""

    def on_lost(self, error: ClientError) -> None:
        """Handle the end of the connection; called once, with its reason."""


class Carrier(ABC):
    """A connection that sends and receives frames: text as bytes, binary as a bytearray.

    Attributes:
        write_paused: The write buffer is full: hold frames back until `Listener.on_writable`.
        broken: The connection has ended without a close from either side.
        deterministic: The server declares its environment deterministic, given seed and actions.
    """

    def __init__(self) -> None:
        self.write_paused = self.broken = self.deterministic = False
        self._loop = asyncio.get_running_loop()
        self._listener: Listener | None = None
        self._stored_frames: list[bytes | bytearray] = []  # received before `listen`
        self._on_frame: Callable[[bytes | bytearray], None] = self._store
        self._frame_received = asyncio.Event()
        self._lost_error: ClientError | None = None

    async def receive(self) -> bytes | bytearray:
        """Return the first frame. Call once, before `listen`.

        Raises:
            ClientError: The connection ended before a frame came.
        """
        await self._frame_received.wait()
        if not self._stored_frames and self._lost_error is not None:
            raise self._lost_error
        return self._stored_frames.pop(0)

    def listen(self, listener: Listener) -> None:
        """Deliver events to a listener from now on, starting with those stored so far."""
        self._listener, self._on_frame = listener, listener.on_frame
        for frame in self._stored_frames:
            listener.on_frame(frame)
        if self._lost_error is not None:
            listener.on_lost(self._lost_error)

    @abstractmethod
    def send(self, frame: bytes, *, binary: bool = False) -> None:
        """Send one frame; text is UTF-8. After `Listener.on_lost` it is dropped."""

    @abstractmethod
    async def close(self) -> None:
        """Close in order, within `connect_timeout_s`. Idempotent.

        After `abort`, wait until its cleanup has ended.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the connection without waiting; remaining cleanup runs in the background. Idempotent."""

    def _store(self, frame: bytes | bytearray) -> None:
        self._stored_frames.append(frame)
        self._frame_received.set()

    def _mark_lost(self, error: ClientError, broken: bool = False) -> None:
        """Record why the connection ended and tell the listener; only the first call counts."""
        if self._lost_error is None:
            self._lost_error, self.broken = error, broken
            self._frame_received.set()
            if self._listener is not None:
                self._listener.on_lost(error)


def unreachable_error(url: str, reason: object) -> ConnectionFailedError:
    """Return the error for a server that does not answer, or whose answer is not an OpenEnv server's."""
    return ConnectionFailedError(
        f"expected an OpenEnv server at {redact_url(url)}, got: {reason}; check that it runs and that the URL is right"
    )


def refusal(url: str, status: int, headers: Mapping[str, str], detail: str, *, socket: bool) -> ClientError:
    """Return the error for an HTTP status that refuses the connection.

    Args:
        url: The URL of the request.
        status: The HTTP status.
        headers: Headers of the response; names in lower case, or a case-insensitive mapping.
        detail: The error text of the response, if any.
        socket: The request was a WebSocket handshake, so plain HTTP is worth suggesting.
    """
    suffix = f": {detail[:300]}" if detail else ""
    message = f"expected {redact_url(url)} to let this client in, got HTTP {status}{suffix}"
    http_hint = ', or pass transport="http" where the server speaks HTTP only' if socket else ""
    match status:
        case 401:
            return AuthenticationError(
                f"{message}; give a token that the server knows: token= in Python, ROPEWALK_TOKEN for a command"
            )
        case 403 | 421:
            cause = "the path" if status == 403 else "the port"
            return AccessRefusedError(
                f"{message}; use a host name and an origin that the server allows, check {cause} of the "
                f"URL{http_hint if status == 403 else ''}"
            )
        case 429 | 503:
            retry_after_s = retry_after(headers.get("retry-after"))
            data = {} if retry_after_s is None else {"retry_after_s": retry_after_s}
            return CapacityError(
                detail or f"the server takes no more sessions (HTTP {status})", CAPACITY_REACHED, data
            )
    # Statuses of servers without a WebSocket at that path. (uvicorn answers a WebSocket 403 in place of 404.)
    hint = http_hint if status in (404, 405, 426) else ""
    return ConnectionFailedError(f"{message}; check that the URL is an OpenEnv server's{hint}")
