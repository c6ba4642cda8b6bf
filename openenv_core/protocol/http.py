"""Plain HTTP: converts frames to HTTP requests and responses to frames; URLs of servers."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic_core import from_json

from openenv_core.errors import ConfigurationError
from openenv_core.protocol import errors as codes
from openenv_core.protocol.jsonio import dumps
from openenv_core.protocol.replies import encode_error

SESSION_HEADER: Final = "X-OpenEnv-Session"
"""Header with the session of a request; in a response, the session that the server keeps."""

SESSION_COOKIE: Final = "openenv_session"
"""Cookie with the session, for callers that keep cookies; the header takes precedence."""

DETERMINISTIC_HEADER: Final = "X-OpenEnv-Deterministic"
"""Header of the WebSocket handshake's response and of /health: the environment declares itself `DETERMINISTIC`."""

DETERMINISTIC: Final = "true"
"""The header's only value. Released servers do not send the header, and released clients ignore it."""

SESSION_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Valid session ids, whether chosen by client or server."""


def is_bearer_token(text: str) -> bool:
    """Whether a text is a valid bearer token: printable ASCII without spaces."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The HTTP request that corresponds to a frame."""

    kind: str  # the frame's type
    method: str
    path: str
    body: bytes | None = None
    is_sessionless: bool = False  # refers to no session


def http_request(frame: bytes, session_id: str, has_session: bool = True) -> HttpRequest:
    """Return the HTTP request that corresponds to a frame.

    Args:
        frame: The frame as it would be sent on a WebSocket.
        session_id: Id of the client's session.
        has_session: Whether the session is already open on the server. Tools can be listed before that.
    """
    message: dict[str, Any] = from_json(frame)
    kind, data = message["type"], message.get("data")
    match kind:
        case "reset":
            return HttpRequest(kind, "POST", "/reset", dumps(data or {}))
        case "step":
            return HttpRequest(kind, "POST", "/step", dumps({"action": data}))
        case "state":
            return HttpRequest(kind, "GET", "/state")
        case "close":
            params = {"session_id": session_id}
            call = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/close", "params": params}
            return HttpRequest(kind, "POST", "/mcp", dumps(call))
        case "mcp":
            rpc: dict[str, Any] = dict(data or {})
            if has_session:
                rpc["params"] = {**rpc.get("params", {}), "session_id": session_id}
            return HttpRequest(kind, "POST", "/mcp", dumps(rpc), is_sessionless=not has_session)
    raise ValueError(f"expected a reset, step, state, mcp or close frame, got {kind!r}")


def reply_frame(request: HttpRequest, body: bytes) -> bytes:
    """Return the frame for a response with status 200."""
    kind = request.kind if request.kind in ("state", "mcp") else "observation"
    return b'{"type":"%b","data":%b}' % (kind.encode(), body or b"null")


def error_frame(status: int, body: bytes, retry_after_s: float | None) -> bytes | None:
    """Return the error frame for an unsuccessful response; None for a status without a corresponding frame.

    Args:
        status: The HTTP status.
        body: Usually `{"detail": ...}` with a text, a list of errors, or the data of an error frame.
        retry_after_s: Seconds from the response's Retry-After header.
    """
    detail = _detail(body)
    extra: dict[str, Any] = {}
    match status:
        case 400 | 413 | 422:
            code = codes.VALIDATION_ERROR
            if isinstance(detail, list):
                extra["errors"] = [_strip_location(error) for error in detail]
                detail = "Invalid message"
        case 404:
            code = codes.SESSION_ERROR
        case 429 | 503:
            code = codes.CAPACITY_REACHED
            if retry_after_s is not None:
                extra["retry_after_s"] = retry_after_s
        case 500:
            code = codes.EXECUTION_ERROR
        case 504:
            code = codes.SESSION_ERROR
        case _:
            return None
    if isinstance(detail, Mapping):
        detail_fields = {str(name): value for name, value in detail.items()}
        code, detail = str(detail_fields.pop("code", code)), detail_fields.pop("message", None)
        extra = {**detail_fields, **extra}
    text = detail if isinstance(detail, str) and detail else f"the server answered with HTTP {status}"
    return encode_error(code, text, extra).encode()


def detail_text(body: bytes) -> str:
    """Return the message of an unsuccessful response."""
    detail = _detail(body)
    if isinstance(detail, Mapping):
        detail = detail.get("message", detail)
    return detail if isinstance(detail, str) else dumps(detail).decode()


def is_from_server(body: bytes) -> bool:
    """Whether an unsuccessful response comes from our server, which sends a code, not from a proxy."""
    detail = _detail(body)
    return isinstance(detail, Mapping) and "code" in detail


def _detail(body: bytes) -> Any:
    try:
        parsed = from_json(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:500]
    return parsed.get("detail", parsed) if isinstance(parsed, dict) else parsed


def _strip_location(error: Any) -> Any:
    """Return a validation error with `loc` relative to the frame's data, not to the HTTP body."""
    if not isinstance(error, Mapping) or not isinstance(error.get("loc"), list):
        return error
    location = error["loc"]
    while location[:1] in (["body"], ["action"]) and len(location) > 1:
        location = location[1:]
    return {**error, "loc": location}


def redact_url(url: str) -> str:
    """Return a URL for messages: without user, password and query, which may be secrets."""
    with suppress(ValueError):  # an unclosed bracket, or a port that is not a number
        parts = urlsplit(url)
        if parts.hostname and parts.port != 0:
            return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    # The password may contain an unquoted special character: hide everything before the last @.
    _, separator, address = url.rpartition("@")
    return ("...@" if separator else "") + address.partition("?")[0]


_HTTP: Final = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_SOCKET: Final = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def websocket_url(base_url: str, session_id: str | None = None) -> str:
    """Return the WebSocket URL for a server's URL.

    Args:
        base_url: The server's URL, with or without `/ws` at its end.
        session_id: An existing session to attach to.

    Raises:
        ConfigurationError: The URL has another scheme or no host.
    """
    scheme, netloc, path, query = _parts(base_url, _SOCKET)
    if session_id is not None:
        query = f"{query}&session_id={quote(session_id)}".lstrip("&")
    return urlunsplit((scheme, netloc, f"{path}/ws", query, ""))


def http_url(base_url: str) -> str:
    """Return the base URL of a server's HTTP routes.

    Raises:
        ConfigurationError: The URL has another scheme or no host.
    """
    scheme, netloc, path, _ = _parts(base_url, _HTTP)
    return urlunsplit((scheme, netloc, path, "", ""))


def _parts(base_url: str, schemes: dict[str, str]) -> tuple[str, str, str, str]:
    try:
        parts = urlsplit(base_url)
        scheme = schemes.get(parts.scheme) if parts.hostname else None
    except ValueError:  # an unclosed bracket
        scheme = None
    if scheme is None:
        raise ConfigurationError(
            f"expected a URL that starts with http://, https://, ws:// or wss://, got {redact_url(base_url)!r}"
        )
    return scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/ws").rstrip("/"), parts.query


def retry_after(value: str | None) -> float | None:
    """Parse a Retry-After header, seconds or a date, to seconds from now; None if it is missing or invalid."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except ValueError:
        return None
