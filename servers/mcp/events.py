"""The latest events of each connection to /mcp, replayed to a client whose stream was cut."""

from typing import Final, NamedTuple

from mcp.server.streamable_http import GET_STREAM_KEY, EventCallback, EventMessage, EventStore
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, JSONRPCMessage, JSONRPCResponse

RETRY_MS: Final = 1000
"""Delay before a client whose stream was cut reconnects, as the server asks it to."""

MAX_EVENTS: Final = 256
"""Events kept per connection; the oldest are dropped."""

MAX_WEIGHT: Final = 1 << 20
"""Approximate characters kept per connection. Of a larger message only its place is kept."""

MAX_TOTAL_WEIGHT: Final = 64 << 20
"""Approximate characters kept of all connections; those that were sent nothing for longest are dropped first."""


_REPLIES: Final = (JSONRPCResponse, JSONRPCError)


class _Event(NamedTuple):
    """One event of a stream; without a message it only gave the client an id to resume from."""

    stream: str
    message: JSONRPCMessage | None
    weight: int


class HeldEvents:
    """The connections whose events are kept, the one most recently sent an event last; bounds their total size."""

    def __init__(self) -> None:
        self._weights: dict[RecentEvents, int] = {}
        self._weight = 0

    def count(self, events: "RecentEvents") -> None:
        """Record the size of a connection's events; drop those of the least recent connections above the limit."""
        self._weight += events.weight - self._weights.pop(events, 0)
        self._weights[events] = events.weight
        while self._weight > MAX_TOTAL_WEIGHT:
            next(iter(self._weights)).clear()

    def drop(self, events: "RecentEvents") -> None:
        """Remove a connection from the total."""
        self._weight -= self._weights.pop(events, 0)


class RecentEvents(EventStore):
    """The latest events of one connection.

    Attributes:
        weight: Approximate characters of all of them.
    """

    def __init__(self, held_events: HeldEvents) -> None:
        self.weight = 0
        self._held_events = held_events
        self._events: dict[str, _Event] = {}  # by id, in order
        self._last_id = 0
        self._standing: int | None = None  # the last event of the stream of GET

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        """Store an event; return its id."""
        self._last_id += 1
        if stream_id == GET_STREAM_KEY:
            self._standing = self._last_id
        weight = len(stream_id) + _measure_weight(message)  # clients choose the stream's id
        if weight > MAX_WEIGHT:
            message = _make_replacement(message)
            weight = len(stream_id) + _measure_weight(message)
        if weight <= MAX_WEIGHT:
            self._events[str(self._last_id)] = _Event(stream_id, message, weight)
            self.weight += weight
        while len(self._events) > MAX_EVENTS or self.weight > MAX_WEIGHT:
            self.weight -= self._events.pop(next(iter(self._events))).weight
        self._held_events.count(self)
        return str(self._last_id)

    def clear(self) -> None:
        """Drop all events."""
        self._events.clear()
        self.weight = 0
        self._held_events.drop(self)

    def after(self, event_id: str) -> tuple[str, dict[str, JSONRPCMessage | None]] | None:
        """Return the stream of an event and the messages after it by id; None if the event is no longer kept."""
        if (event := self._events.get(event_id)) is not None:
            later = {
                recent_id: recent.message
                for recent_id, recent in self._events.items()
                if recent.stream == event.stream and int(recent_id) > int(event_id)
            }
            return event.stream, later
        if event_id == str(self._standing):
            return GET_STREAM_KEY, {}  # the events dropped since were of other streams
        return None

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        """Send the stream's events after `last_event_id`; return the stream's id if more are to come."""
        missed = self.after(last_event_id)
        if missed is None:
            return None
        stream, later = missed
        for event_id, message in later.items():
            if message is not None:
                await send_callback(EventMessage(message, event_id))
                if isinstance(message, _REPLIES):
                    return None
        return stream

    def is_reply(self, event_id: str) -> bool:
        """Whether a stored event is the reply to a request, which is the last event of its stream."""
        event = self._events.get(event_id)
        return event is not None and isinstance(event.message, _REPLIES)


def _make_replacement(message: JSONRPCMessage | None) -> JSONRPCError | None:
    """Return what replaces a message that is too large: an error for a reply, since a client waits for it."""
    if not isinstance(message, _REPLIES):
        return None
    text = (
        f"expected a reply of at most {MAX_WEIGHT} characters to a call whose stream was cut, got a longer one, "
        "which is not kept; make the call again"
    )
    return JSONRPCError(jsonrpc="2.0", id=message.id, error=ErrorData(code=INTERNAL_ERROR, message=text))


def _measure_weight(message: JSONRPCMessage | None) -> int:
    """Return the characters of a message's JSON."""
    return 0 if message is None else len(message.model_dump_json(by_alias=True, exclude_none=True))
