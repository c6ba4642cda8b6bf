"""A request to /mcp: which dialect it speaks and of which session, how it is refused, and how the SDK is handed it."""

import asyncio
import json
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from starlette.types import Receive, Scope, Send

from openenv_core.protocol import jsonrpc
from openenv_core.protocol.errors import CAPACITY_REACHED, RefusalError
from openenv_core.protocol.http import SESSION_HEADER, SESSION_ID
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from servers.execution import end
from servers.routes.answers import CLIENT_LEFT, RETRY_AFTER_S, json_answer
from servers.routes.connection import MCP_PATH, path_of
from servers.security.bodies import replay
from servers.security.guard import owner_of
from servers.sessions import DeadlineExceededError, SessionBusyError, UnknownSessionError

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
            return self.connection.partition(SHARED)[0]
        return self.in_path or self.in_header


def is_mcp(scope: Scope) -> bool:
    """Whether a request is for /mcp, or below it."""
    path = path_of(scope)
    return path == MCP_PATH or _in_path(path) is not None


def parse_request(scope: Scope, body: bytes) -> McpRequest:
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
    return McpRequest(
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


HANDLES = (
    "POST openenv/session/create to /mcp for one, then use /mcp/{session_id}, or put the id in the header "
    "X-OpenEnv-Session"
)
"""How a client of the stateless wire comes by a session."""


class McpRequestRefusedError(Exception):
    """A request that the SDK does not get to see.

    Args:
        status: The HTTP status.
        fault: What the caller is told.
        retry: It may come again soon.
    """

    def __init__(self, status: int, fault: JsonRpcFaultError, *, retry: bool = False) -> None:
        super().__init__(fault.message)
        self.status = status
        self.fault = fault
        self.retry = retry

    async def tell(self, asked: McpRequest, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the refusal."""
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.retry else None
        body = jsonrpc.encode_fault(asked.request_id, self.fault)
        await json_answer(body, self.status, headers)(scope, receive, send)


def refused_by(refusal: RefusalError) -> McpRequestRefusedError:
    """Return what a refusal of the table of sessions is for a standard client."""
    data: Any = refusal.extra or None
    if isinstance(refusal, UnknownSessionError):
        return no_session(refusal.message)
    fault = JsonRpcFaultError(jsonrpc.SERVER_ERROR, refusal.message, data)
    if refusal.code == CAPACITY_REACHED:
        return McpRequestRefusedError(503, fault, retry=True)
    if isinstance(refusal, SessionBusyError):
        return McpRequestRefusedError(429, fault, retry=True)
    return McpRequestRefusedError(504 if isinstance(refusal, DeadlineExceededError) else 500, fault)


def no_session(message: str) -> McpRequestRefusedError:
    """Return the refusal of a request about a session that is not there, or is somebody else's."""
    return McpRequestRefusedError(404, JsonRpcFaultError(jsonrpc.INVALID_REQUEST, message))


def no_tools() -> McpRequestRefusedError:
    """Return the refusal of every request to an environment without tools."""
    text = "expected an environment with tools, got one that offers none; it is served on /ws and plain HTTP"
    return McpRequestRefusedError(404, JsonRpcFaultError(jsonrpc.INTERNAL_ERROR, text))


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, and where its response goes.

    Attributes:
        asked: What it asks for.
        scope: Its head.
        body: Its body, which has been taken from `receive`.
        receive: Tells when the client leaves.
        send: Takes the response.
    """

    asked: McpRequest
    scope: Scope
    body: bytes
    receive: Receive
    send: Send

    @property
    def owner(self) -> str:
        """Fingerprint of the caller's token."""
        return owner_of(self.scope)

    def on_connection(self, inner: bytes, send: Send) -> "Exchange":
        """Return the request as the SDK is given it.

        Args:
            inner: What the SDK knows the connection by; empty where there is none yet.
            send: Takes what it sends.
        """
        headers = [
            (name, value) for name, value in self.scope["headers"] if name.lower() != CONNECTION_HEADER
        ]
        if inner:
            headers.append((CONNECTION_HEADER, inner))
        return replace(self, scope={**self.scope, "headers": headers}, send=send)

    def replayed(self) -> Receive:
        """Return a `receive` that begins with the body."""
        if self.asked.http != "POST":
            return self.receive
        return replay({"type": "http.request", "body": self.body, "more_body": False}, self.receive)

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something, but cancel it when the client leaves.

        Raises:
            McpRequestRefusedError: The client has left.
        """
        task = asyncio.create_task(work)
        watch = asyncio.create_task(self._departure())
        try:
            await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise McpRequestRefusedError(
                    CLIENT_LEFT, JsonRpcFaultError(jsonrpc.SERVER_ERROR, "the client has left")
                )
            return task.result()
        finally:
            await end(watch)
            await end(task)

    async def _departure(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
