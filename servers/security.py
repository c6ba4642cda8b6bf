"""The guard in front of an application: checks Host, Origin and token, and limits request bodies.

The checks of Host and Origin keep a web page from using its visitor's browser to drive a server that the browser can
reach. A page may send requests to any address. If the page's own host name resolves to the server's address (DNS
rebinding), the browser treats the server as same-origin, and only Host reveals it; otherwise Origin does. Bodies of
HTTP requests are read completely, limited in size and time, before the application sees them.
"""

import asyncio
import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openenv_core.errors import ConfigurationError, PicklableError
from openenv_core.proxies import ip_address
from servers.listening import is_loopback
from servers.settings import ServerSettings

_PRINCIPAL: Final = "ropewalk.principal"
"""Scope key of the name of the client's token."""

_REFUSAL_READ_TIMEOUT_S: Final = 2.0
"""Seconds that a refused request's body is still read and discarded. A connection closed while data is in flight is
reset, and the client would lose the response."""

TOKEN_SUBPROTOCOL: Final = "ropewalk.token."
"""Prefix of a WebSocket subprotocol that carries a token in URL-safe base64. A browser cannot set headers on a
WebSocket, and a URL would end up in logs."""

_MAX_CACHED_HOSTS: Final = 64

_ANY: Final = "*"
_NETLOC: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?")
_ORIGIN: Final = re.compile(rf"(?P<scheme>https?)://{_NETLOC.pattern}", re.IGNORECASE)
_HOST_PATTERN: Final = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}

_Headers: TypeAlias = Mapping[bytes, Sequence[bytes]]


class HttpRefusalError(PicklableError):
    """The request is refused.

    Args:
        status: The HTTP status.
        detail: The message for the client; never contains a secret.
        headers: Additional response headers.
    """

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = dict(headers)


async def send_refusal(refusal: HttpRefusalError, scope: Scope, send: Send) -> None:
    """Send a refusal as an HTTP response; a WebSocket is refused without being accepted."""
    if scope["type"] == "websocket" and "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1008})  # the server responds with 403
        return
    response = JSONResponse({"detail": str(refusal)}, refusal.status, refusal.headers)
    await response(scope, _no_message, send)


async def _no_message() -> Message:
    """Stand for the connection's `receive`, which a response with a body does not call."""
    return {"type": "http.disconnect"}


def owner_of(scope: Mapping[str, Any]) -> str:
    """Return the name of the client's token; empty if the server has no tokens or no guard."""
    return str(scope.get(_PRINCIPAL, ""))


class Guard:
    """An ASGI application that checks Host, Origin and token of every connection, and limits bodies.

    A WebSocket is checked at its handshake only: afterwards the application uses the server's own `receive` and `send`.

    Args:
        app: The application to guard. `owner_of` gives it the name of the client's token.
        settings: The server's settings.
        streamed: Returns whether the application itself reads and limits a request's body, given the scope.
        is_open: Returns whether a request needs no token, given the scope.

    Raises:
        ConfigurationError: An allowed host or origin in the settings is malformed.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        *,
        streamed: Callable[[Scope], bool] = lambda _: False,
        is_open: Callable[[Scope], bool] = lambda _: False,
    ) -> None:
        self._app = app
        self._is_streamed = streamed
        self._is_open = is_open
        self._tokens = Tokens(settings.tokens)
        self._hosts = _AllowedHosts(settings.allowed_hosts)
        self._origins = _Origins(settings.allowed_origins)
        self._max_body_bytes = settings.max_body_bytes
        self._body_timeout_s = settings.body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http":
            body_from = await self._admit_request(scope, receive, send)
            if body_from is None:
                return
            receive = body_from
        elif scope["type"] == "websocket":
            try:
                self._admit(scope, _headers(scope))  # none of whose state stays while the WebSocket is open
            except HttpRefusalError as refusal:
                await send_refusal(refusal, scope, send)
                return
        await self._app(scope, receive, send)

    async def _admit_request(self, scope: Scope, receive: Receive, send: Send) -> Receive | None:
        """Admit a request; return the `receive` of its body, or None if it was refused or the client disconnected."""
        headers = _headers(scope)
        try:
            self._admit(scope, headers)
            if self._is_streamed(scope) or not self._expects_body(headers):
                return receive
            body = await self._read_body(receive)
        except HttpRefusalError as refusal:
            await _refuse(refusal, scope, headers, receive, send)
            return None
        return None if body is None else replay(body, receive)

    def _admit(self, scope: Scope, headers: _Headers) -> None:
        local = (scope.get("server") or (None,))[0]
        host = self._hosts.check(headers.get(b"host", ()), local)
        self._origins.check(headers.get(b"origin", ()), host)
        authorization = headers.get(b"authorization", ())
        if not authorization and (self._is_open(scope) or _is_preflight(scope, headers)):
            return
        if not authorization and scope["type"] == "websocket":
            authorization = _find_tokens(scope.get("subprotocols") or ())
        scope[_PRINCIPAL] = self._tokens.principal(authorization)

    def _expects_body(self, headers: _Headers) -> bool:
        """Return whether a request has a body; refuse one whose headers already show that it is unacceptable."""
        encodings = [value.strip().lower() for value in headers.get(b"content-encoding", ())]
        if any(value not in (b"", b"identity") for value in encodings):
            raise HttpRefusalError(415, "a body with Content-Encoding is not accepted; send it uncompressed")
        if b"transfer-encoding" in headers:
            if b"content-length" in headers:
                raise HttpRefusalError(400, "the request has both Transfer-Encoding and Content-Length")
            return True
        lengths = {value.strip() for value in headers.get(b"content-length", ())}
        if not lengths:
            return False
        length = lengths.pop()
        if lengths or not length.isdigit():
            raise HttpRefusalError(400, "expected one whole number in Content-Length")
        # int() of many digits is slow, and a length of more than twenty digits is too large in any case.
        if len(length) > 20 or int(length) > self._max_body_bytes:
            raise self._make_too_large()
        return int(length) > 0

    async def _read_body(self, receive: Receive) -> bytes | None:
        """Read the whole body; return None if the client disconnected before its end."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > self._max_body_bytes:
                        raise self._make_too_large()
                    parts.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            text = f"expected the whole body within {self._body_timeout_s:g} s, got {size} bytes of it"
            raise HttpRefusalError(408, text) from None

    def _make_too_large(self) -> HttpRefusalError:
        return HttpRefusalError(
            413,
            f"the body is larger than {self._max_body_bytes} bytes; the limit is --max-body "
            "(ROPEWALK_MAX_BODY_BYTES)",
        )


async def _refuse(
    refusal: HttpRefusalError, scope: Scope, headers: _Headers, receive: Receive, send: Send
) -> None:
    body_comes = b"transfer-encoding" in headers or any(
        value.strip() != b"0" for value in headers.get(b"content-length", ())
    )
    if not body_comes:
        await send_refusal(refusal, scope, send)
        return
    # For the client the response is complete, by its Content-Length. The connection closes a little later, after the
    # rest of the body has been received and discarded.

    async def send_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    refusal.headers["connection"] = "close"
    await send_refusal(refusal, scope, send_open)
    try:
        async with asyncio.timeout(_REFUSAL_READ_TIMEOUT_S):
            more = True
            while more:
                message = await receive()
                more = message["type"] == "http.request" and message.get("more_body", False)
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})


def _is_preflight(scope: Scope, headers: _Headers) -> bool:
    """Whether a browser asks for the CORS middleware's answer, which it does without credentials."""
    return scope.get("method") == "OPTIONS" and b"access-control-request-method" in headers


def _headers(scope: Scope) -> dict[bytes, list[bytes]]:
    headers: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.lower(), []).append(value)
    return headers


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns a body already read, and then the connection's further messages."""
    was_sent = False

    async def receive_again() -> Message:
        nonlocal was_sent
        if was_sent:
            return await receive()
        was_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


class _Netloc(NamedTuple):
    """A host in lower case (an IPv6 address without brackets) and its port, if given."""

    host: str
    port: int | None


class _AllowedHosts:
    """The hosts that a server accepts in Host.

    Names that the settings allow are accepted everywhere. On a connection to a loopback address, any other name but
    localhost is refused, since it most likely comes from DNS rebinding. On other addresses, names without a dot are
    accepted too: containers and machines of a local network have such names, and they cannot be registered in public
    DNS. IP addresses are always accepted, since rebinding needs a name.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        names = [name.lower().removesuffix(".") for name in allowed]
        for name in names:
            if not _HOST_PATTERN.fullmatch(name):
                raise ConfigurationError(
                    f"expected an allowed host to be a name without scheme and port, *.NAME or *, got {name!r}"
                )
        self._names = names
        # Clients send the same few hosts with every request; those that are refused are not kept.
        self._accept = lru_cache(maxsize=_MAX_CACHED_HOSTS)(self._accept_host)

    def check(self, values: Sequence[bytes], local: object) -> _Netloc:
        """Return the host and port of a request's Host header, or refuse the request."""
        if len(values) != 1:
            raise HttpRefusalError(400, f"expected one header Host, got {len(values)}")
        return self._accept(values[0], local)

    def _accept_host(self, value: bytes, local: object) -> _Netloc:
        match = _NETLOC.fullmatch(value.decode("latin-1").strip())
        netloc = _parse_netloc(match) if match else None
        if netloc is None:
            raise HttpRefusalError(400, "expected a name or an address in the header Host")
        if not self._serves(netloc.host, local):
            raise HttpRefusalError(
                421,
                f"expected a Host of this server, got {netloc.host!r}; to serve that name, start with "
                f"--allowed-host {netloc.host} (ROPEWALK_ALLOWED_HOSTS)",
            )
        return netloc

    def _serves(self, host: str, local: object) -> bool:
        if host == "localhost" or ip_address(host) is not None:
            return True
        if any(fnmatchcase(host, name) for name in self._names):
            return True
        return "." not in host and not (isinstance(local, str) and is_loopback(local))


class _Origins:
    """The origins of pages that may use a server: its own, and those that the settings allow."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allows_any = _ANY in allowed
        self._allowed = frozenset(_parse_origin(origin) or origin for origin in allowed)
        for origin in self._allowed - {_ANY, "null"}:
            if isinstance(origin, str):
                raise ConfigurationError(
                    f"expected an allowed origin as in https://example.org, or null, or *, got {origin!r}"
                )

    def check(self, values: Sequence[bytes], host: _Netloc) -> None:
        """Refuse a request whose Origin is neither absent, nor the host's own, nor allowed."""
        if not values or self._allows_any:
            return
        text = values[0].decode("latin-1").strip()
        origin = _parse_origin(text)
        # A proxy may have terminated TLS, so a missing port in Host means the default port of the Origin's scheme.
        is_own = origin is not None and origin[1:] == (host.host, host.port or _DEFAULT_PORTS[origin[0]])
        if len(values) == 1 and (is_own or (origin or text) in self._allowed):
            return
        raise HttpRefusalError(
            403,
            "the Origin is neither this server's own nor an allowed one; to let a page in, start with "
            "--allowed-origin SCHEME://HOST (ROPEWALK_ALLOWED_ORIGINS)",
        )


def _parse_netloc(match: re.Match[str]) -> _Netloc | None:
    host, port = match["host"].lower(), match["port"]
    if host.startswith("["):
        host = host[1:-1]
        if ip_address(host) is None:
            return None
    else:
        host = host.removesuffix(".")
    if not host or (port is not None and int(port) > 65_535):
        return None
    return _Netloc(host, int(port) if port is not None else None)


def _parse_origin(origin: str) -> tuple[str, str, int] | None:
    match = _ORIGIN.fullmatch(origin.removesuffix("/"))
    netloc = _parse_netloc(match) if match else None
    if match is None or netloc is None:
        return None
    scheme = match["scheme"].lower()
    return scheme, netloc.host, netloc.port or _DEFAULT_PORTS[scheme]


class Tokens:
    """The tokens of a server, stored as digests."""

    def __init__(self, tokens: Sequence[str]) -> None:
        digests = [hashlib.sha256(token.encode()).digest() for token in tokens]
        self._principals = list(zip(digests, principals(tokens), strict=True))

    def principal(self, authorizations: Sequence[bytes]) -> str:
        """Return the name of the client's token; empty if the server has no tokens.

        Every digest is compared in full, even after a match, so that timing reveals nothing.
        """
        if not self._principals:
            return ""
        if not authorizations:
            raise _make_unauthorized("none")
        scheme, _, token = authorizations[0].strip().partition(b" ")
        if len(authorizations) > 1 or scheme.lower() != b"bearer" or not token.strip():
            raise _make_unauthorized("something else")
        digest = hashlib.sha256(token.strip()).digest()
        principal = ""
        for known, name in self._principals:
            if hmac.compare_digest(known, digest):
                principal = name
        if not principal:
            raise _make_unauthorized("one that it does not know")
        return principal


def _find_tokens(subprotocols: Iterable[str]) -> list[bytes]:
    """Return the token among a WebSocket's subprotocols, in the form of Authorization headers."""
    for name in subprotocols:
        if name.startswith(TOKEN_SUBPROTOCOL):
            text = name.removeprefix(TOKEN_SUBPROTOCOL)
            with suppress(ValueError):
                return [b"Bearer " + base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))]
    return []


def principals(tokens: Sequence[str]) -> list[str]:
    """Return the names of tokens, one for each.

    They are hashed differently from the digests that are compared, since names are passed around in the server.
    """
    return [
        hashlib.blake2b(token.encode(), digest_size=16, person=b"rw-principal").hexdigest()
        for token in tokens
    ]


def _make_unauthorized(got: str) -> HttpRefusalError:
    text = f"expected the header 'Authorization: Bearer TOKEN' with one of this server's tokens, got {got}"
    return HttpRefusalError(401, text, {"www-authenticate": "Bearer"})
