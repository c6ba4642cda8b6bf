"""The seam between a session and whatever carries its frames."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from openenv_core.errors import (
    AccessRefusedError,
    AuthenticationError,
    CapacityError,
    ClientError,
    ConnectionFailedError,
    FactoryError,
    SessionError,
)
from openenv_core.protocol.errors import CAPACITY_REACHED
from openenv_core.protocol.http import redact_url, retry_after

SESSION_ENDED: Final = (CapacityError, FactoryError, SessionError)
"""What a server says last."""


@dataclass(frozen=True, slots=True)
class CarrierOptions:
    """How a connection is made and kept.

    Attributes:
        connect_timeout_s: Seconds until an attempt to connect, or to close in order, is given up.
        max_message_bytes: The longest message that is received.
        ping_interval_s: Seconds of silence until the server is asked whether it lives; None never asks.
        ping_timeout_s: Seconds until a missing answer breaks the connection; None waits for ever.
        headers: Further headers of every HTTP request, the opening one of a WebSocket included.
        queue_timeout_s: Seconds that a full server is waited for.
        subprotocol: Offered to the server of a WebSocket, which may take it.
    """

    connect_timeout_s: float
    max_message_bytes: int
    ping_interval_s: float | None
    ping_timeout_s: float | None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # a token may be in it
    subprotocol: str | None = None
    queue_timeout_s: float = 0.0

    @property
    def prefer(self) -> str:
        """The header `Prefer` (RFC 7240): a full server may keep a request in its queue for a part of its time-out."""
        return f"wait={int(min(0.8 * self.connect_timeout_s, self.queue_timeout_s))}"


class Listener(Protocol):
    """Hears what a carrier brings."""

    def on_frame(self, frame: bytes | bytearray) -> None:
        """Take a frame: text as bytes, binary as a bytearray."""

    def on_room(self) -> None:
        """Learn that frames can be sent again."""

    def on_lost(self, error: ClientError) -> None:
        """Learn that no more frames will come, and why; once."""


class Carrier(ABC):
    """Carries frames: text as bytes, binary as a bytearray. What is abstract is a library's part.

    Attributes:
        full: A frame has to wait for `Listener.on_room`: what was sent before has not left yet.
        broken: The connection has ended, and neither side has closed it.
        deterministic: Whether the server says that the seed and the actions decide everything.
    """

    def __init__(self) -> None:
        self.full = self.broken = self.deterministic = False
        self._loop = asyncio.get_running_loop()
        self._listener: Listener | None = None
        self._backlog: list[bytes | bytearray] = []  # before anybody listened
        self._deliver: Callable[[bytes | bytearray], None] = self._store
        self._arrived = asyncio.Event()
        self._lost: ClientError | None = None

    async def receive(self) -> bytes | bytearray:
        """Return the first frame; before anybody listens, and once.

        Raises:
            ClientError: The connection has ended without one.
        """
        await self._arrived.wait()
        if not self._backlog and self._lost is not None:
            raise self._lost
        return self._backlog.pop(0)

    def listen(self, listener: Listener) -> None:
        """Have someone hear what comes, and what has come."""
        self._listener, self._deliver = listener, listener.on_frame
        for frame in self._backlog:
            listener.on_frame(frame)
        if self._lost is not None:
            listener.on_lost(self._lost)

    @abstractmethod
    def send(self, frame: bytes, *, binary: bool = False) -> None:
        """Send one frame; text is given as UTF-8. Behind the end of the connection, which was told, it is dropped."""

    @abstractmethod
    async def close(self) -> None:
        """Close in order, within the time that was allowed for connecting. Idempotent.

        After `abort`, wait until nothing is left.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the connection without waiting, and start what else the end takes. Idempotent."""

    @abstractmethod
    def orphan(self) -> None:
        """Do what `abort` does, without the event loop of the connection, which has closed.

        What else the end takes is started on the running loop, where `close` waits for it.
        """

    def _store(self, frame: bytes | bytearray) -> None:
        self._backlog.append(frame)
        self._arrived.set()

    def _lose(self, error: ClientError, broken: bool = False) -> None:
        """Note why no more frames will come; the first reason counts."""
        if self._lost is None:
            self._lost, self.broken = error, broken
            self._arrived.set()
            if self._listener is not None:
                self._listener.on_lost(error)


def unreachable(url: str, reason: object) -> ConnectionFailedError:
    """Return the error for a server that does not answer, or not as one."""
    return ConnectionFailedError(
        f"expected an OpenEnv server at {redact_url(url)}, got: {reason}; check that it runs and that the URL is right"
    )


def refusal(url: str, status: int, headers: Mapping[str, str], detail: str, *, socket: bool) -> ClientError:
    """Return the error for a server that answered but let nobody in.

    Args:
        url: What was asked for.
        status: The HTTP status.
        headers: Of the answer; names in lower case, or a mapping that does not mind.
        detail: The server's own words, if any.
        socket: Whether a WebSocket was asked for, and plain HTTP is something to try.
    """
    suffix = f": {detail[:300]}" if detail else ""
    got = f"expected {redact_url(url)} to let this client in, got HTTP {status}{suffix}"
    other_way = ', or pass transport="http" where the server speaks HTTP only' if socket else ""
    match status:
        case 401:
            return AuthenticationError(f"{got}; pass token= with a token that the server knows")
        case 403 | 421:
            cause = "the path" if status == 403 else "the port"
            return AccessRefusedError(
                f"{got}; use a host name and an origin that the server allows, check {cause} of the "
                f"URL{other_way if status == 403 else ''}"
            )
        case 429 | 503:
            wait = retry_after(headers.get("retry-after"))
            data = {} if wait is None else {"retry_after_s": wait}
            return CapacityError(
                detail or f"the server takes no more sessions (HTTP {status})", CAPACITY_REACHED, data
            )
    # Servers without a WebSocket at that path answer so; 403 is uvicorn's way to say 404 to a WebSocket.
    hint = other_way if status in (404, 405, 426) else ""
    return ConnectionFailedError(f"{got}; check that the URL is an OpenEnv server's{hint}")
