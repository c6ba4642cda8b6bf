"""What clients of the handshake versions were told last, for those whose stream was cut and who come back for the rest.

The SDK has one store for all connections, and streams that are named by the client's own numbers: so what is kept is
kept by connection, and nobody gets to see another's.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from mcp.server.streamable_http import GET_STREAM_KEY, EventCallback, EventMessage, EventStore
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, JSONRPCMessage, JSONRPCResponse

RETRY_MS: Final = 1000
"""What a client whose stream was cut is asked to wait before it comes back."""

MAX_EVENTS: Final = 256
"""Of one connection; the oldest are forgotten."""

MAX_WEIGHT: Final = 1 << 20
"""Characters, roughly, of one connection. Of what is heavier by itself only its place is kept."""


MAX_HELD: Final = 64 << 20
"""Characters, roughly, of all connections together; those that were told nothing for longest are forgotten first."""


class Event(NamedTuple):
    """One event of a stream; without a message it only gave the client a number to come back with."""

    number: int
    stream: str
    message: JSONRPCMessage | None
    weight: int


class Kept:
    """The last events of one connection.

    Attributes:
        weight: Of all of them.
    """

    def __init__(self) -> None:
        self.weight = 0
        self._events: deque[Event] = deque()
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
            self._events.append(Event(self._last, stream, message, weight))
            self.weight += weight
        while len(self._events) > MAX_EVENTS or self.weight > MAX_WEIGHT:
            self.weight -= self._events.popleft().weight
        return str(self._last)

    def clear(self) -> None:
        """Forget all."""
        self._events.clear()
        self.weight = 0

    def after(self, event_id: str) -> tuple[str, list[Event]] | None:
        """Return the stream of an event, and what followed it there; None where it is known no more."""
        stream = next((event.stream for event in self._events if str(event.number) == event_id), None)
        if stream is None and event_id == str(self._standing):
            return GET_STREAM_KEY, []  # what has been forgotten since was told on other streams
        if stream is None:
            return None
        later = [event for event in self._events if event.stream == stream and event.number > int(event_id)]
        return stream, later


class Events(EventStore):
    """The events of all connections, each reached only from within its own requests."""

    def __init__(self) -> None:
        self._kept: ContextVar[Kept | None] = ContextVar("kept", default=None)
        self._held: dict[Kept, None] = {}
        self._weight = 0

    @contextmanager
    def of(self, kept: Kept) -> Iterator[None]:
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

    def forget(self, kept: Kept) -> None:
        """Forget what is kept of a connection."""
        self._let_go(kept)
        kept.clear()

    def _let_go(self, kept: Kept) -> None:
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
