"""A request to /mcp: which dialect it speaks and of which session, and how it is refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from openenv_core.protocol import jsonrpc
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.http import SESSION_HEADER, SESSION_ID
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from servers.routes.http import path_of, status_of
from servers.security import owner_of, replay
from servers.sessions import UnknownSessionError

MCP_PATH: Final = "/mcp"
INITIALIZE: Final = "initialize"
DISCOVER: Final = "server/discover"

SHARED_ID_SEPARATOR: Final = ":"
"""Stands, in the id of a connection that shares a session with others, behind the session's id, which has none."""

HANDLES: Final = (
    "POST openenv/session/create to /mcp for one, then use /mcp/{session_id}, or put the id in the header "
    "X-OpenEnv-Session"
)
"""How a client of the stateless wire comes by a session."""


@dataclass(frozen=True, slots=True)
class McpRequest:
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
            return self.connection.partition(SHARED_ID_SEPARATOR)[0]
        return self.in_path or self.in_header


def is_mcp(scope: Scope) -> bool:
    """Whether a request is for /mcp, or below it."""
    path = path_of(scope)
    return path == MCP_PATH or _session_in(path) is not None


def parse_request(scope: Scope, body: bytes) -> McpRequest:
    """Read what a request to /mcp asks for."""
    headers: dict[str, str] = {}
    streams = False
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers.setdefault(name, value)
        streams |= name == "accept" and "text/event-stream" in value.lower()
    connection, version = headers.get("mcp-session-id"), headers.get("mcp-protocol-version")
    in_path = _session_in(path_of(scope))
    marked = streams or any(named is not None for named in (in_path, connection, version))
    # The released dialect is read by whoever answers it, and need not be read here too.
    method, request_id = _read_rpc(body) if marked or INITIALIZE.encode() in body else (None, None)
    return McpRequest(
        http=scope["method"],
        connection=connection,
        version=version,
        last_event=headers.get("last-event-id"),
        in_path=in_path,
        in_header=headers.get(SESSION_HEADER.lower()),
        method=method,
        request_id=request_id,
        standard=marked or method == INITIALIZE,
    )


def _session_in(path: str) -> str | None:
    rest = path.removeprefix(MCP_PATH + "/")
    return rest if rest != path and SESSION_ID.fullmatch(rest) is not None else None


def _read_rpc(body: bytes) -> tuple[str | None, int | str | None]:
    """Return the method and the id of a request; whoever serves it says what is wrong with it."""
    try:
        request: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(request, Mapping):
        return None, None
    method, request_id = request.get("method"), request.get("id")
    known = isinstance(request_id, int | str) and not isinstance(request_id, bool)
    return method if isinstance(method, str) else None, request_id if known else None


class McpRequestRefusedError(Exception):
    """A request that the SDK does not get to see."""

    def __init__(self, status: int, fault: JsonRpcFaultError) -> None:
        super().__init__(fault.message)
        self.status = status
        self.fault = fault

    @classmethod
    def invalid(cls, text: str, status: int = 400) -> "McpRequestRefusedError":
        """Return the refusal of a request that makes no sense."""
        return cls(status, JsonRpcFaultError(jsonrpc.INVALID_REQUEST, text))

    @classmethod
    def of(cls, refusal: RefusalError) -> "McpRequestRefusedError":
        """Return what a refusal of the table of sessions is for a standard client."""
        unknown = isinstance(refusal, UnknownSessionError)
        code = jsonrpc.INVALID_REQUEST if unknown else jsonrpc.SERVER_ERROR
        return cls(status_of(refusal), JsonRpcFaultError(code, refusal.message, refusal.extra or None))


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, and where its response goes.

    Attributes:
        request: What the client requests.
        scope: Its head.
        body: Its body, which has been taken from `receive`.
        receive: Tells when the client leaves.
        send: Takes the response.
    """

    request: McpRequest
    scope: Scope
    body: bytes
    receive: Receive
    send: Send

    @property
    def owner(self) -> str:
        """Fingerprint of the caller's token."""
        return owner_of(self.scope)

    @property
    def replay_body(self) -> Receive:
        """A `receive` that begins with the body."""
        return replay(self.body, self.receive) if self.request.http == "POST" else self.receive
