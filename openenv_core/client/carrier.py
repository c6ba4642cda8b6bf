"""The seam between a session and whatever carries its frames."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from time import time
from typing import Final

from openenv_core.errors import (
    AccessRefusedError,
    AuthenticationError,
    CapacityError,
    ClientError,
    ConnectionFailedError,
)
from openenv_core.protocol.errors import CAPACITY_REACHED
from openenv_core.protocol.http import redact_url


@dataclass(frozen=True, slots=True)
class CarrierOptions:
    """How a connection is made and kept.

    Attributes:
        connect_timeout_s: Seconds until an attempt to connect, or to close in order, is given up.
        max_message_bytes: The longest message that is received.
        ping_interval_s: Seconds of silence until the server is asked whether it lives; None never asks.
        ping_timeout_s: Seconds until a missing answer breaks the connection; None waits for ever.
        headers: Further headers of every HTTP request, the opening one of a WebSocket included.
        subprotocol: Of a WebSocket; a server that does not speak it is none.
    """

    connect_timeout_s: float
    max_message_bytes: int
    ping_interval_s: float | None
    ping_timeout_s: float | None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # a token may be in it
    subprotocol: str | None = None


MAX_UNREAD: Final = 4
"""Messages that may wait to be read before the connection is no longer read from. The wire has one at a time."""


class ReplyOverdueError(Exception):
    """The session has stopped waiting; nothing is lost, and what was sent is still on its way."""


class Carrier(ABC):
    """Carries frames for one task at a time, which waits here for the next one: text as bytes, binary as a bytearray.

    The task is woken by a frame, by the end of the connection, by room to write, or by an interruption, and looks
    for itself which it was. What is abstract is a library's part.

    Attributes:
        unread: Frames that have come and that `recv` has not returned yet.
        full: A frame has to wait for `wait_room`: what was sent before has not left yet.
        deterministic: Whether the server says that the seed and the actions decide everything.
    """

    def __init__(self) -> None:
        self.unread: deque[bytes | bytearray] = deque()
        self.full = self.deterministic = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._interrupted = False
        self._lost: ClientError | None = None
        self._paused = False

    async def wait_room(self) -> None:
        """Wait until a frame can be sent.

        Raises:
            ConnectionLostError: The connection has broken.
            ReplyOverdueError: `interrupt` was called.
        """
        while self._lost is None and self.full:
            await self._wait()
        if self._lost is not None:
            raise self._lost

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Send one text frame, given as UTF-8.

        Raises:
            ConnectionLostError: The connection has broken.
        """

    async def recv(self) -> bytes | bytearray:
        """Return the next frame. Cancelling or interrupting the wait loses nothing.

        Raises:
            ConnectionLostError: The connection has broken, and every frame that came before was read.
            ReplyOverdueError: `interrupt` was called.
        """
        while not self.unread:
            if self._lost is not None:
                raise self._lost
            # As `_wait`, but written out: each coroutine between a step and its reply costs both ways.
            self._interrupted = False  # of a wait that was cancelled in the same moment
            self._waiter = waiter = self._loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None
            if self._interrupted:
                raise ReplyOverdueError
        frame = self.unread.popleft()
        if self._paused:
            self._resume()
        return frame

    def interrupt(self) -> None:
        """Make whoever waits in `wait_room` or `recv` raise ReplyOverdueError. Does nothing where nobody waits."""
        if self._waiter is not None and not self._waiter.done():
            self._interrupted = True
            self._waiter.set_result(None)

    @abstractmethod
    async def close(self) -> None:
        """Close in order, within the time that was allowed for connecting. Idempotent.

        After `abort`, wait until nothing is left.
        """

    @abstractmethod
    def abort(self) -> None:
        """Break the connection at once, and start what else the end takes. Idempotent."""

    @abstractmethod
    def orphan(self) -> None:
        """Do what `abort` does, without the event loop of the connection, which has closed.

        What else the end takes is started on the running loop, where `close` waits for it.
        """

    def _put(self, frame: bytes | bytearray) -> None:
        self.unread.append(frame)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if len(self.unread) >= MAX_UNREAD and not self._paused:
            self._pause()

    def _lose(self, error: ClientError) -> None:
        """Note why no more frames will come; the first reason counts."""
        if self._lost is None:
            self._lost = error
        self._wake()

    def _pause(self) -> None:  # noqa: B027 - plain HTTP brings one reply a request, and has nothing to pause
        """Read no more, and note that in `_paused`."""

    def _resume(self) -> None:  # noqa: B027 - likewise
        """Read on after a pause."""

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._interrupted = False
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._interrupted:
            raise ReplyOverdueError


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
    words = f": {detail[:300]}" if detail else ""
    got = f"expected {redact_url(url)} to let this client in, got HTTP {status}{words}"
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


def retry_after(value: str | None) -> float | None:
    """Read a Retry-After header, seconds or a date, as seconds from now; None where it says nothing."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except ValueError:
        return None
