"""What the SDK sends to a client of the handshake versions, on its way there."""

import re
from collections.abc import Callable
from typing import Final

from starlette.types import Message, Send

from servers.mcp.asked import CONNECTION_HEADER

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
