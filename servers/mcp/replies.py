"""Sends the response to a request to /mcp: as a stream, or as plain JSON if no stream is needed."""

from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Send

from servers.mcp.events import RecentEvents

_STREAM_HEADERS: Final = ("cache-control", "connection", "x-accel-buffering")


class Replies:
    """An ASGI `send` for one request on a connection.

    If the first event of a stream is the reply, and so the only one, it is sent as JSON. Official clients drop events
    beyond a megabyte but accept JSON of any size, and they close a connection whose stream has brought the reply.

    Args:
        send: The server's `send`.
        events: The events of the connection.
        on_start: Called with the status before the client receives it.
        answers: Whether the response ends with a reply; False for the stream of GET.

    Attributes:
        status: Status of the response; 0 before it has begun.
    """

    def __init__(
        self, send: Send, events: RecentEvents, on_start: Callable[[int], None], *, answers: bool
    ) -> None:
        self._send = send
        self._events = events
        self._on_start = on_start
        self._answers = answers
        self._held: list[Message] = []
        self._over = False
        self.status = 0

    async def __call__(self, message: Message) -> None:
        """Send one part of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._on_start(self.status)
            if self._answers and _is_stream(message):
                self._held = [message]
                return
        elif self._held:
            # An event has one line per field, and the SDK's JSON no line breaks.
            event = dict(
                line.split(b": ", 1) for line in message.get("body", b"").splitlines() if b": " in line
            )
            if event.get(b"data") == b"" and len(self._held) == 1:
                self._held.append(message)  # the id to resume from if the stream is cut
                return
            earlier_events, self._held = self._held, []
            if b"data" in event and self._events.is_reply(event.get(b"id", b"").decode("latin-1")):
                self._over = True
                await self._send(_as_json(earlier_events[0], len(event[b"data"])))
                await self._send({"type": "http.response.body", "body": event[b"data"]})
                return
            for earlier in earlier_events:
                await self._send(earlier)
        if not self._over:
            await self._send(message)


def _is_stream(message: Message) -> bool:
    return Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")


def _as_json(head: Message, length: int) -> Message:
    headers = MutableHeaders(raw=list(head["headers"]))
    for name in _STREAM_HEADERS:
        del headers[name]
    headers.update({"content-type": "application/json", "content-length": str(length)})
    return {**head, "headers": headers.raw}
