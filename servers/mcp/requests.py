"""A request to /mcp: its dialect and its session, and its refusal."""

import json
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from openenv_core.errors import PicklableError
from openenv_core.protocol import jsonrpc
from openenv_core.protocol.http import SESSION_ID
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from servers.routes.http import path_of
from servers.security import owner_of, replay

MCP_PATH: Final = "/mcp"
INITIALIZE: Final = "initialize"
DISCOVER: Final = "server/discover"

SHARED_ID_SEPARATOR: Final = ":"
"""Follows the session's id, which never contains it, in the id of a connection that shares a session."""


class McpRequest:
    """A request to /mcp, or to /mcp/{session_id}.

    Args:
        scope: Its ASGI scope.
        body: Its whole body.

    Attributes:
        connection: The id of its connection, as drawn at the handshake; None without one.
        version: The protocol version in its header, if any.
        in_path: The session's id in the path, if any.
        standard: Whether it is standard MCP, as opposed to the released dialect.
        method: The JSON-RPC method.
        request_id: The JSON-RPC id.
    """

    def __init__(self, scope: Scope, body: bytes) -> None:
        self.scope, self.body = scope, body
        self.http: str = scope["method"]
        self.headers = Headers(scope=scope)
        self.connection = self.headers.get("mcp-session-id")
        self.version = self.headers.get("mcp-protocol-version")
        self.in_path = _find_session_id(path_of(scope))
        streams = any("text/event-stream" in value.lower() for value in self.headers.getlist("accept"))
        is_marked = streams or (self.in_path, self.connection, self.version) != (None, None, None)
        # The released dialect's route parses its own body; it need not be parsed here too.
        rpc = read_rpc(body) if is_marked or INITIALIZE.encode() in body else {}
        method, request_id = rpc.get("method"), rpc.get("id")
        has_id = isinstance(request_id, int | str) and not isinstance(request_id, bool)
        self.method: str | None = method if isinstance(method, str) else None
        self.request_id: int | str | None = request_id if has_id else None
        self.standard: bool = is_marked or method == INITIALIZE

    @property
    def session(self) -> str | None:
        """The id of the session that it is about; None if it names none."""
        if self.connection is not None:
            return self.connection.partition(SHARED_ID_SEPARATOR)[0]
        return self.in_path

    @property
    def owner(self) -> str:
        """Fingerprint of the caller's token."""
        return owner_of(self.scope)

    def replay(self, receive: Receive) -> Receive:
        """Return a `receive` that yields the body first."""
        return replay(self.body, receive) if self.http == "POST" else receive


def is_mcp(scope: Scope) -> bool:
    """Whether a request is for /mcp or /mcp/{session_id}."""
    path = path_of(scope)
    return path == MCP_PATH or _find_session_id(path) is not None


def _find_session_id(path: str) -> str | None:
    remainder = path.removeprefix(MCP_PATH + "/")
    return remainder if remainder != path and SESSION_ID.fullmatch(remainder) is not None else None


def read_rpc(body: bytes) -> dict[str, Any]:
    """Return a JSON-RPC request, not validated; {} if it is no object, which its handler reports."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return request if isinstance(request, dict) else {}


class McpRequestRefusedError(PicklableError):
    """A request that is refused before it reaches the SDK.

    Args:
        status: The status of the response.
        text: What is wrong.
        code: The code of the JSON-RPC error.
    """

    def __init__(self, status: int, text: str, code: int = jsonrpc.INVALID_REQUEST) -> None:
        super().__init__(text)
        self.status = status
        self.fault = JsonRpcFaultError(code, text)
