"""Plain HTTP: a frame as a request of method, path and body, the answer to it as a frame; and URLs of servers."""

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
"""Names the session of a request; in a reply, the session that the server keeps."""

SESSION_COOKIE: Final = "openenv_session"
"""The same, for callers that keep cookies; the header goes first."""

DETERMINISTIC_HEADER: Final = "X-OpenEnv-Deterministic"
"""In the answer to a WebSocket's opening and to /health: what the environment says of itself by `DETERMINISTIC`."""

DETERMINISTIC: Final = "true"
"""Its one value. Released servers do not send the header, and released clients do not look at it."""

SESSION_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""What a session's id may be, whoever chooses it."""


def is_bearer_token(text: str) -> bool:
    """Whether a header can carry a text as a bearer token: printable ASCII without spaces."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request that says what a frame says."""

    kind: str  # the frame's type
    method: str
    path: str
    body: bytes | None = None
    is_sessionless: bool = False  # it is about no session


def http_request(frame: bytes, session_id: str, begun: bool = True) -> HttpRequest:
    """Return the request that says the same as a frame.

    Args:
        frame: What would be sent on a socket.
        session_id: Of this caller's session.
        begun: Whether the server has it yet. What tools there are can be asked before.
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
            if begun:
                rpc["params"] = {**rpc.get("params", {}), "session_id": session_id}
            return HttpRequest(kind, "POST", "/mcp", dumps(rpc), is_sessionless=not begun)
    raise ValueError(f"expected a reset, step, state, mcp or close frame, got {kind!r}")


def reply_frame(request: HttpRequest, body: bytes) -> bytes:
    """Return the frame for an answer of status 200."""
    kind = request.kind if request.kind in ("state", "mcp") else "observation"
    return b'{"type":"%b","data":%b}' % (kind.encode(), body or b"null")


def error_frame(status: int, body: bytes, retry_after_s: float | None) -> bytes | None:
    """Return the error frame for an answer that is no success; None where its status is that of no frame.

    Args:
        status: The HTTP status.
        body: `{"detail": ...}` with a text, a list of faults, or the data of an error frame; or anything.
        retry_after_s: What the answer's Retry-After says.
    """
    detail = _detail(body)
    extra: dict[str, Any] = {}
    match status:
        case 400 | 413 | 422:
            code = codes.VALIDATION_ERROR
            if isinstance(detail, list):
                extra["errors"] = [_inside(error) for error in detail]
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
    """Return the words of an answer that is no success."""
    detail = _detail(body)
    if isinstance(detail, Mapping):
        detail = detail.get("message", detail)
    return detail if isinstance(detail, str) else dumps(detail).decode()


def said_by_server(body: bytes) -> bool:
    """Whether an answer that is no success is one of ours, which has a code, and not of a proxy before it."""
    detail = _detail(body)
    return isinstance(detail, Mapping) and "code" in detail


def _detail(body: bytes) -> Any:
    try:
        parsed = from_json(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:500]
    return parsed.get("detail", parsed) if isinstance(parsed, dict) else parsed


def _inside(error: Any) -> Any:
    """Return one fault with its place as frames give it: inside the data, not the body of a request."""
    if not isinstance(error, Mapping) or not isinstance(error.get("loc"), list):
        return error
    place = error["loc"]
    while place[:1] in (["body"], ["action"]) and len(place) > 1:
        place = place[1:]
    return {**error, "loc": place}


def redact_url(url: str) -> str:
    """Return a URL as messages have it: without user, password and query, which may be secrets."""
    with suppress(ValueError):  # brackets without an end, or a port that is no number
        parts = urlsplit(url)
        if parts.hostname and parts.port != 0:
            return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    # Perhaps the password has a character that ought to be quoted: nothing in front of the last @ is shown.
    _, at, rest = url.rpartition("@")
    return ("...@" if at else "") + rest.partition("?")[0]


_HTTP: Final = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_SOCKET: Final = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def websocket_url(base_url: str, session_id: str | None = None) -> str:
    """Return the address of the session socket for a server's URL.

    Args:
        base_url: With or without the `/ws` at its end.
        session_id: The standing session to attach to.

    Raises:
        ConfigurationError: The URL is of another scheme, or names no host.
    """
    scheme, netloc, path, query = _parts(base_url, _SOCKET)
    if session_id is not None:
        query = f"{query}&session_id={quote(session_id)}".lstrip("&")
    return urlunsplit((scheme, netloc, f"{path}/ws", query, ""))


def http_url(base_url: str) -> str:
    """Return the address that the paths of plain HTTP are appended to.

    Raises:
        ConfigurationError: The URL is of another scheme, or names no host.
    """
    scheme, netloc, path, _ = _parts(base_url, _HTTP)
    return urlunsplit((scheme, netloc, path, "", ""))


def _parts(base_url: str, schemes: dict[str, str]) -> tuple[str, str, str, str]:
    try:
        parts = urlsplit(base_url)
        scheme = schemes.get(parts.scheme) if parts.hostname else None
    except ValueError:  # brackets without an end
        scheme = None
    if scheme is None:
        raise ConfigurationError(
            f"expected a URL that starts with http://, https://, ws:// or wss://, got {redact_url(base_url)!r}"
        )
    return scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/ws").rstrip("/"), parts.query


def retry_after(value: str | None) -> float | None:
    """Read a Retry-After header, seconds or a date, as seconds from now; None where it says nothing."""
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
