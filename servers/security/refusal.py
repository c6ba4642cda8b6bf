"""A connection that is turned away: what it is told, on HTTP and on a WebSocket."""

import json
from collections.abc import Iterable

from starlette.types import Scope, Send

Header = tuple[bytes, bytes]


class TurnedAwayError(Exception):
    """The caller is turned away.

    Args:
        status: The HTTP status.
        detail: What was expected, what came, what to do. Never a secret.
        headers: What else the response carries.
    """

    def __init__(self, status: int, detail: str, headers: Iterable[Header] = ()) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = tuple(headers)

    @property
    def body(self) -> bytes:
        """The response's body."""
        return json.dumps({"detail": str(self)}).encode()


async def turn_away(turned: TurnedAwayError, scope: Scope, send: Send, *, closing: bool = False) -> None:
    """Send the refusal; a WebSocket is never accepted for it.

    Args:
        turned: What to say.
        scope: The connection's.
        send: Where to.
        closing: Say that the connection closes, and leave the response open: the caller ends it.
    """
    body = turned.body
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *turned.headers,
    ]
    if closing:
        headers.append((b"connection", b"close"))
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": turned.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": closing})
    elif "websocket.http.response" in (scope.get("extensions") or {}):
        await send({"type": "websocket.http.response.start", "status": turned.status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": body})
    else:
        await send({"type": "websocket.close", "code": 1008})  # the server makes a 403 of it
