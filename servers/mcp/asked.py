"""What a request to /mcp is, as its head and body say: standard MCP or the released dialect, and of which session."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Scope

from openenv_core.protocol.http import SESSION_HEADER, SESSION_ID
from servers.routes.paths import MCP_PATH, path_of

CONNECTION_HEADER: Final = b"mcp-session-id"
VERSION_HEADER: Final = b"mcp-protocol-version"
LAST_EVENT_HEADER: Final = b"last-event-id"
INITIALIZE: Final = "initialize"
DISCOVER: Final = "server/discover"

SHARED: Final = ":"
"""Stands, in the id of a connection that shares a session with others, behind the session's id, which has none."""

_HANDLE_HEADER: Final = SESSION_HEADER.lower().encode()
_INITIALIZE: Final = INITIALIZE.encode()
_STREAM: Final = b"text/event-stream"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to /mcp, or to /mcp/{session_id}.

    Attributes:
        http: Its HTTP method.
        connection: The id of the connection, drawn at the handshake, that it belongs to.
        version: The protocol's, where it names one.
        last_event: The id of the event that it has seen last of a stream that was cut.
        in_path: The id of the session that its path names.
        in_header: The id of the session that its header X-OpenEnv-Session names.
        method: Of JSON-RPC.
        request_id: Of JSON-RPC.
        standard: It is standard MCP, and not the released dialect.
    """

    http: str
    connection: str | None
    version: str | None
    last_event: str | None
    in_path: str | None
    in_header: str | None
    method: str | None
    request_id: int | str | None
    standard: bool

    @property
    def session(self) -> str | None:
        """The id of the session that it is about; None where it names none."""
        if self.connection is not None:
            return self.connection.partition(SHARED)[0]
        return self.in_path or self.in_header


def is_mcp(scope: Scope) -> bool:
    """Whether a request is for /mcp, or below it."""
    path = path_of(scope)
    return path == MCP_PATH or _in_path(path) is not None


def asked(scope: Scope, body: bytes) -> Asked:
    """Read what a request to /mcp asks for.

    Args:
        scope: Its head.
        body: Its body, which may be anything.
    """
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.lower(), value)
    in_path = _in_path(path_of(scope))
    streams = any(_STREAM in value.lower() for name, value in scope["headers"] if name.lower() == b"accept")
    marked = streams or in_path is not None or CONNECTION_HEADER in headers or VERSION_HEADER in headers
    # The released dialect is read by whoever answers it, and need not be read here too.
    method, request_id = _rpc(body) if marked or _INITIALIZE in body else (None, None)
    return Asked(
        http=scope["method"],
        connection=_text(headers.get(CONNECTION_HEADER)),
        version=_text(headers.get(VERSION_HEADER)),
        last_event=_text(headers.get(LAST_EVENT_HEADER)),
        in_path=in_path,
        in_header=_text(headers.get(_HANDLE_HEADER)),
        method=method,
        request_id=request_id,
        standard=marked or method == INITIALIZE,
    )


def _in_path(path: str) -> str | None:
    rest = path.removeprefix(MCP_PATH + "/")
    return rest if rest != path and SESSION_ID.fullmatch(rest) is not None else None


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _rpc(body: bytes) -> tuple[str | None, int | str | None]:
    if not body:
        return None, None
    try:
        request: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None, None  # whoever serves the request says what is wrong with it
    if not isinstance(request, Mapping):
        return None, None
    method, request_id = request.get("method"), request.get("id")
    known = isinstance(request_id, int | str) and not isinstance(request_id, bool)
    return method if isinstance(method, str) else None, request_id if known else None
