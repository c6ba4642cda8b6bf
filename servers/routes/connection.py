"""Connections: frames of a WebSocket in by `on_frame` and out by `send`, over ASGI or on our own protocol."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from openenv_core.watchdog import Watchdog
from servers.execution import keep

logger = logging.getLogger("servers")

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Frame: TypeAlias = str | bytes

FAST_PATH_EXTENSION: Final = "ropewalk.fast_path"
"""Key of the ASGI scope extension that holds the server's protocol object, if it is ours."""

MAX_UNSENT: Final = 32
"""Unsent frames with which no further frame is read."""


class FastPath(Protocol):
    """The server's protocol object, if it is ours; see `servers.protocols`."""

    def connect(self, receive: Receive, send: Send, send_timeout_s: float) -> "Connection":
        """Return a connection that passes whole frames beside ASGI."""

    def abort(self) -> None:
        """Drop the connection at once, with all unread data."""


class Connection:
    """An accepted WebSocket, over the ASGI of any server.

    Nothing is read while `MAX_UNSENT` replies are unsent, so that a client that does not read them costs no more.

    Args:
        receive: The ASGI channel.
        send: Likewise.
        send_timeout_s: Seconds that a client may leave a reply unread; 0 for no limit.
        drop: Drops the connection at once, where the server can.

    Attributes:
        on_frame: Called with each frame.
        on_error: Called if that has raised.
        broken: Whether the connection has not been closed in order, as far as known.
        closing: Whether no further frames are sent.
        is_sending: Whether frames are being sent, which those to come must not overtake.
        paused: Done when frames may be read again; None if they may.
    """

    _sends_in_reader: ClassVar[bool] = True
    """Whether the task that reads sends the replies that come at once; otherwise it reads on meanwhile."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        send_timeout_s: float,
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        self.on_frame: Callable[[Frame], None] = lambda frame: None
        self.on_error: Callable[[], None] = lambda: None
        self.broken = True
        self.closing = False
        self._receive = receive
        self._send = send
        self._drop = drop
        self._watchdog = Watchdog(send_timeout_s or None, self._drop_client)
        self._outbox: deque[Frame] = deque()
        self._close_code: int | None = None
        self._is_reading = False  # `on_frame` is running, after which `run` sends
        self.is_sending = False
        self._sender: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self.paused: asyncio.Future[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Begin to read; return the task that ends when the client has disconnected or `stop` or `close` was called."""
        self._reader = asyncio.create_task(self._read())
        return self._reader

    async def _read(self) -> None:
        with suppress(OSError):  # the client has disconnected
            while True:
                if len(self._outbox) >= MAX_UNSENT and self._sender is not None:
                    await asyncio.wait([self._sender])
                if self.paused is not None:
                    await self.paused
                message = await self._receive()
                if message["type"] != "websocket.receive":
                    self.broken &= is_break(message)  # not if the client has asked to close
                    break
                text = message.get("text")
                self._is_reading = self._sends_in_reader
                try:
                    self.on_frame(message["bytes"] if text is None else text)
                except Exception:
                    self.on_error()
                self._is_reading = False
                if self._outbox and self._sender is None:
                    await self._send_all()
        self.closing = True
        if self._sender is not None:
            self._sender.cancel()

    def send(self, frame: Frame) -> None:
        """Send a frame after those before it."""
        if not self.closing:
            self._outbox.append(frame)
            if not (self.is_sending or self._is_reading):
                self._start_sending()

    def close(self, code: int) -> None:
        """Close the WebSocket once all frames are sent, and stop reading."""
        if not self.closing:
            self.closing, self._close_code = True, code
            if not self.is_sending:
                self._start_sending()

    async def finish(self, code: int) -> None:
        """Close the WebSocket as `close`, and wait until that is done."""
        self.close(code)
        if self._sender is not None:
            await asyncio.wait([self._sender])
        self._watchdog.close()

    def stop(self) -> None:
        """Stop reading."""
        if self._reader is not None:
            self._reader.cancel()

    def abort(self) -> None:
        """Give the connection up at once, with what is unsent."""
        self.closing = True
        self._outbox.clear()
        self._drop()
        if self._sender is not None:
            self._sender.cancel()
        self.stop()

    def pause(self) -> None:
        """Read no further frame until `resume`."""
        if self.paused is None:
            self.paused = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        """Read on."""
        paused, self.paused = self.paused, None
        if paused is not None and not paused.done():
            paused.set_result(None)

    def _start_sending(self) -> None:
        self.is_sending = True
        self._sender = keep(asyncio.create_task(self._send_in_task()))

    async def _send_in_task(self) -> None:
        try:
            with suppress(OSError):
                await self._send_all()
        finally:
            self._sender = None

    async def _send_all(self) -> None:
        """Send what is in the outbox, and then the close, if it was asked for."""
        self.is_sending = True
        outbox, send, watchdog = self._outbox, self._send, self._watchdog
        try:
            while outbox:
                frame = outbox.popleft()
                watchdog.start()
                await send({"type": "websocket.send", "text" if isinstance(frame, str) else "bytes": frame})
            if self._close_code is not None:
                watchdog.start()
                await send({"type": "websocket.close", "code": self._close_code})
                self.stop()
        finally:
            watchdog.stop()
            self.is_sending = False

    def _drop_client(self) -> None:
        logger.warning("a client does not read its replies; its connection is dropped")
        self.abort()


def connect(scope: Message, receive: Receive, send: Send, send_timeout_s: float) -> Connection:
    """Return the connection of an ASGI scope."""
    protocol: FastPath | None = (scope.get("extensions") or {}).get(FAST_PATH_EXTENSION)
    if protocol is None:
        return Connection(receive, send, send_timeout_s)
    # Middleware that wraps these has to see every message.
    if all(getattr(channel, "__self__", None) is protocol for channel in (receive, send)):
        return protocol.connect(receive, send, send_timeout_s)
    return Connection(receive, send, send_timeout_s, protocol.abort)


def is_break(message: Message) -> bool:
    """Whether a connection broke: without a close frame, or with 1011, sent by clients whose ping is not answered."""
    # uvicorn also reports 1005 for a connection without a close frame, but gives a reason only with one.
    return message.get("code") in (None, 1006, 1011) or (message["code"] == 1005 and "reason" not in message)
