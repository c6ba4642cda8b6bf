"""What the SDK sends, on its way to the client; and what was sent last, for a client whose stream was cut."""

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from mcp.server.streamable_http import GET_STREAM_KEY, EventCallback, EventMessage, EventStore
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, JSONRPCMessage, JSONRPCResponse
from starlette.types import Message, Send

from servers.mcp.requests import CONNECTION_HEADER

_EVENT: Final = re.compile(rb"(?:id: \d+\r\n)?event: message\r\ndata: ")
_PRIMING: Final = re.compile(rb"id: \d+\r\ndata: \r\n(?:retry: \d+\r\n)?\r\n")
_REPLY: Final = re.compile(rb'\{"jsonrpc":"2\.0","id":(?:\d+|null|"(?:[^"\\]|\\.)*"),"(?:result|error)":')
_END: Final = b"\r\n\r\n"
_OF_STREAMS: Final = (
    b"content-type",
    b"cache-control",
    b"connection",
    b"x-accel-buffering",
    b"content-length",
)


class Replies:
    """A `send` that puts our id of the connection in the place of the SDK's.

    Where the first thing on a stream is the reply, and so the only one, it is sent as JSON. Official clients drop
    events beyond a megabyte and take JSON of any size; and they close a connection whose stream has brought the reply.

    Args:
        send: The server's.
        link_id: Our id.
        drawn: Called with the SDK's id, before the client gets to know of it.
        answers: It answers a request; what is sent has an end.

    Attributes:
        status: Of the response; 0 before it has begun.
    """

    def __init__(
        self, send: Send, link_id: bytes, drawn: Callable[[bytes], None] | None, *, answers: bool
    ) -> None:
        self._send = send
        self._link_id = link_id
        self._drawn = drawn
        self._answers = answers
        self._held: list[Message] = []
        self._over = False
        self.status = 0

    async def __call__(self, message: Message) -> None:
        """Send one part of the response."""
        if message["type"] == "http.response.start":
            message = self._renamed(message)
            self.status = message["status"]
            if self._answers and _streams(message):
                self._held = [message]
                return
        elif self._held:
            body = message.get("body", b"")
            if len(self._held) == 1 and _PRIMING.fullmatch(body):
                self._held.append(message)  # the number to come back with, should the stream be cut
                return
            held, self._held = self._held, []
            if (reply := _whole(body)) is not None:
                self._over = True
                await self._send(_as_json(held[0], len(reply)))
                await self._send({"type": "http.response.body", "body": reply})
                return
            for earlier in held:
                await self._send(earlier)
        if not self._over:
            await self._send(message)

    def _renamed(self, message: Message) -> Message:
        headers = []
        for name, value in message["headers"]:
            if name.lower() == CONNECTION_HEADER:
                if self._drawn is not None and message["status"] < 400:
                    self._drawn(value)
                value = self._link_id
            headers.append((name, value))
        return {**message, "headers": headers}


def _streams(message: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in message["headers"]
    )


def _whole(body: bytes) -> bytes | None:
    """Return the reply in an event; None where it is none, or something else follows."""
    begins = _EVENT.match(body)
    if begins is None or not body.endswith(_END):
        return None
    data = body[begins.end() : -len(_END)]
    # A reply comes last; where a notification or a question comes first, a stream it has to be.
    return data if _REPLY.match(data) is not None and b"\n" not in data else None


def _as_json(head: Message, length: int) -> Message:
    headers = [(name, value) for name, value in head["headers"] if name.lower() not in _OF_STREAMS]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    return {**head, "headers": headers}


RETRY_MS: Final = 1000
"""What a client whose stream was cut is asked to wait before it comes back."""

MAX_EVENTS: Final = 256
"""Of one connection; the oldest are forgotten."""

MAX_WEIGHT: Final = 1 << 20
"""Characters, roughly, of one connection. Of what is heavier by itself only its place is kept."""


MAX_HELD: Final = 64 << 20
"""Characters, roughly, of all connections together; those that were told nothing for longest are forgotten first."""


class StreamEvent(NamedTuple):
    """One event of a stream; without a message it only gave the client a number to come back with."""

    number: int
    stream: str
    message: JSONRPCMessage | None
    weight: int


class RecentEvents:
    """The last events of one connection.

    Attributes:
        weight: Of all of them.
    """

    def __init__(self) -> None:
        self.weight = 0
        self._events: deque[StreamEvent] = deque()
        self._last = 0
        self._standing: int | None = None  # the last event of the stream that waits for whatever comes

    def add(self, stream: str, message: JSONRPCMessage | None) -> str:
        """Keep an event; return its id."""
        self._last += 1
        if stream == GET_STREAM_KEY:
            self._standing = self._last
        weight = len(stream) + weigh(message)  # streams are named by clients
        if weight > MAX_WEIGHT:
            message = _in_place_of(message)
            weight = len(stream) + weigh(message)
        if weight <= MAX_WEIGHT:
            self._events.append(StreamEvent(self._last, stream, message, weight))
            self.weight += weight
        while len(self._events) > MAX_EVENTS or self.weight > MAX_WEIGHT:
            self.weight -= self._events.popleft().weight
        return str(self._last)

    def clear(self) -> None:
        """Forget all."""
        self._events.clear()
        self.weight = 0

    def after(self, event_id: str) -> tuple[str, list[StreamEvent]] | None:
        """Return the stream of an event, and what followed it there; None where it is known no more."""
        stream = next((event.stream for event in self._events if str(event.number) == event_id), None)
        if stream is None and event_id == str(self._standing):
            return GET_STREAM_KEY, []  # what has been forgotten since was told on other streams
        if stream is None:
            return None
        later = [event for event in self._events if event.stream == stream and event.number > int(event_id)]
        return stream, later


class StreamEvents(EventStore):
    """The events of all connections, each reached only from within its own requests."""

    def __init__(self) -> None:
        self._kept: ContextVar[RecentEvents | None] = ContextVar("kept", default=None)
        self._held: dict[RecentEvents, None] = {}
        self._weight = 0

    @contextmanager
    def of(self, kept: RecentEvents) -> Iterator[None]:
        """Have what runs in the block, and what it starts, belong to a connection."""
        token = self._kept.set(kept)
        try:
            yield
        finally:
            self._kept.reset(token)

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        """Keep an event; return its id."""
        kept = self._kept.get()
        if kept is None:
            return ""
        self._let_go(kept)
        event_id = kept.add(stream_id, message)
        self._held[kept] = None  # the last of them now
        self._weight += kept.weight
        while self._weight > MAX_HELD:
            self.forget(next(iter(self._held)))
        return event_id

    def forget(self, kept: RecentEvents) -> None:
        """Forget what is kept of a connection."""
        self._let_go(kept)
        kept.clear()

    def _let_go(self, kept: RecentEvents) -> None:
        if kept in self._held:
            del self._held[kept]
            self._weight -= kept.weight

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        """Send what a stream has told since; return its name where more is to come."""
        kept = self._kept.get()
        found = None if kept is None else kept.after(last_event_id)
        if found is None:
            return None
        stream, later = found
        for event in later:
            if event.message is not None:
                await send_callback(EventMessage(event.message, str(event.number)))
                if isinstance(event.message, JSONRPCResponse | JSONRPCError):
                    return None
        return stream


def _in_place_of(message: JSONRPCMessage | None) -> JSONRPCError | None:
    """Return what is kept in the place of a message that is too heavy; for a reply an error, since somebody waits."""
    if not isinstance(message, JSONRPCResponse | JSONRPCError):
        return None
    text = (
        f"expected a reply of at most {MAX_WEIGHT} characters to a call whose stream was cut, got a longer one, "
        "which is not kept; make the call again"
    )
    return JSONRPCError(jsonrpc="2.0", id=message.id, error=ErrorData(code=INTERNAL_ERROR, message=text))


def weigh(message: JSONRPCMessage | None) -> int:
    """Return roughly how many characters a message has; looks no further than to MAX_WEIGHT."""
    weight = 0
    parts: list[Any] = [getattr(message, name, None) for name in ("result", "params", "error")]
    while parts and weight <= MAX_WEIGHT:
        part = parts.pop()
        weight += len(part) if isinstance(part, str) else 8
        if isinstance(part, dict):
            weight += sum(map(len, part))
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
        elif isinstance(part, JSONRPCError) or hasattr(part, "model_fields_set"):
            parts += vars(part).values()
    return weight
