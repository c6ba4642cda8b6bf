"""The first thing that a connection meets."""

from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from servers.security.bodies import Bodies, ClientLeftError, discard, replay
from servers.security.hosts import AllowedHosts, Origins
from servers.security.refusal import TurnedAwayError, turn_away
from servers.security.tokens import Tokens
from servers.settings import ServerSettings

PRINCIPAL = "ropewalk.principal"
"""The key of the scope under which the name of the caller's token stands."""


def owner_of(scope: Scope) -> str:
    """Return the name of the caller's token; an empty one where there are no tokens, or no guard."""
    return str(scope.get(PRINCIPAL, ""))


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
        self._hosts = AllowedHosts(settings.allowed_hosts)
        self._origins = Origins(settings.allowed_origins)
        self._bodies = Bodies(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http":
            body_from = await self._let_in(scope, receive, send)
            if body_from is not None:
                await self._app(scope, body_from, send)
        elif scope["type"] != "websocket":
            await self._app(scope, receive, send)
        elif (turned := self._refuse(scope)) is None:
            # Nothing of the checks is kept for as long as the socket lives.
            await self._app(scope, receive, send)
        else:
            await turn_away(turned, scope, send)

    def _refuse(self, scope: Scope) -> TurnedAwayError | None:
        try:
            self._admit(scope, _headers(scope))
        except TurnedAwayError as turned:
            return turned
        return None

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> Receive | None:
        """Return what gives the body of a request, or None where the request has been dealt with."""
        headers = _headers(scope)
        try:
            self._admit(scope, headers)
            if not self._bodies.announced(headers):
                return receive
            body = await self._bodies.read(receive)
            return replay({"type": "http.request", "body": body, "more_body": False}, receive)
        except TurnedAwayError as turned:
            await _refuse(turned, scope, headers, receive, send)
        except ClientLeftError:
            pass
        return None

    def _admit(self, scope: Scope, headers: Mapping[bytes, Sequence[bytes]]) -> None:
        local = (scope.get("server") or (None,))[0]
        host = self._hosts.check(headers.get(b"host", ()), local)
        self._origins.check(headers.get(b"origin", ()), host)
        scope[PRINCIPAL] = self._tokens.principal(headers.get(b"authorization", ()))


async def _refuse(
    turned: TurnedAwayError,
    scope: Scope,
    headers: Mapping[bytes, Sequence[bytes]],
    receive: Receive,
    send: Send,
) -> None:
    body_comes = b"transfer-encoding" in headers or any(
        value.strip() != b"0" for value in headers.get(b"content-length", ())
    )
    if body_comes:
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
