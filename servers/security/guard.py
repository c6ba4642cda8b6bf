"""The first thing that a connection meets."""

from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from servers.security.bodies import Bodies, ClientLeft, discard, replay
from servers.security.hosts import Hosts, Origins
from servers.security.refusal import Turned, turn_away
from servers.security.tokens import Tokens
from servers.settings import ServerSettings

PRINCIPAL = "ropewalk.principal"
"""The key of the scope under which the name of the caller's token stands."""


class Guard:
    """An ASGI application that checks Host, Origin and token of every connection, and bounds bodies.

    A WebSocket is refused before it is accepted, and costs nothing here once it is: the application gets the
    server's own `receive` and `send`.

    Args:
        app: What is guarded. It finds the name of the caller's token, or an empty one, in the scope.
        settings: The server's settings.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._tokens = Tokens(settings.tokens)
        self._hosts = Hosts(settings.allowed_hosts)
        self._origins = Origins(settings.allowed_origins)
        self._bodies = Bodies(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        kind = scope["type"]
        if kind not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = _headers(scope)
        try:
            scope[PRINCIPAL] = self._admit(scope, headers)
            if kind == "http" and self._bodies.announced(headers):
                receive = replay(await self._bodies.read(receive), receive)
        except Turned as turned:
            await _refuse(turned, scope, headers, receive, send)
        except ClientLeft:
            pass
        else:
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope, headers: Mapping[bytes, Sequence[bytes]]) -> str:
        local = (scope.get("server") or (None,))[0]
        host = self._hosts.check(headers.get(b"host", ()), local)
        self._origins.check(headers.get(b"origin", ()), host)
        return self._tokens.principal(headers.get(b"authorization", ()))


async def _refuse(
    turned: Turned, scope: Scope, headers: Mapping[bytes, Sequence[bytes]], receive: Receive, send: Send
) -> None:
    body_comes = b"transfer-encoding" in headers or any(
        value.strip() != b"0" for value in headers.get(b"content-length", ())
    )
    if scope["type"] == "http" and body_comes:
        # The response is whole for the caller, who knows its length; the connection closes after a moment.
        await turn_away(turned, scope, send, closing=True)
        await discard(receive)
        await send({"type": "http.response.body", "body": b""})
    else:
        await turn_away(turned, scope, send)


def _headers(scope: Scope) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.lower(), []).append(value)
    return found
