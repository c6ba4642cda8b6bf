"""Standard MCP over HTTP: finds each request's session and passes the request to the SDK."""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Final

from mcp.server.runner import serve_loop
from mcp.server.streamable_http import StreamableHTTPServerTransport, check_accept_headers
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import InitializeRequest
from mcp_types.jsonrpc import jsonrpc_message_adapter
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Send

from openenv_core.errors import describe_faults
from openenv_core.protocol import jsonrpc
from openenv_core.protocol.errors import RefusalError, short
from openenv_core.protocol.frames import Reset
from servers.execution import CLOSE_TIMEOUT_S, FATAL, cancel_task, keep
from servers.mcp.context import KEY, RequestOrigin
from servers.mcp.events import RETRY_MS, HeldEvents, RecentEvents
from servers.mcp.handlers import CHANGES, Handlers, make_server
from servers.mcp.hub import Hub, Peer
from servers.mcp.replies import Replies
from servers.mcp.requests import (
    DISCOVER,
    INITIALIZE,
    SHARED_ID_SEPARATOR,
    McpRequest,
    McpRequestRefusedError,
)
from servers.routes.http import CLIENT_LEFT, answer_request, report_error, while_connected
from servers.sessions import EnvironmentSession, SessionTable
from servers.settings import ServerSettings
from servers.tooling import Tooling

logger = logging.getLogger("servers")

_MAX_HELLO_BYTES: Final = 256 * 1024
"""Limit of the handshake's body, which is kept as long as its connection."""

MAX_CONNECTIONS: Final = 64
"""Connections that may share one session; beyond that the least recently used is closed."""


class _Connection(Peer):
    """One connection of the handshake versions.

    Attributes:
        session: The session that it belongs to.
        hub: The session's listeners, of which it is one.
        owns_session: Whether the connection opened the session, and closes it.
        id: The value of its `mcp-session-id` header.
        events: The latest events sent on it.
        transport: The SDK's transport.
        established: Whether the SDK has accepted its handshake.
        task: The task that serves it.
        posts: Number of requests in flight, streams of GET not counted.
        streams: Number of open streams of GET, on which no reply is due.
        idle: Set while `posts` is zero.
        last_used_at: When its last request ended, by the event loop's clock.
    """

    def __init__(
        self,
        session: EnvironmentSession,
        hub: "Hub[_Connection]",
        *,
        owns_session: bool,
        held_events: HeldEvents,
    ) -> None:
        super().__init__()
        self.session = session
        self.hub = hub
        self.owns_session = owns_session
        self.id = session.id if owns_session else f"{session.id}{SHARED_ID_SEPARATOR}{secrets.token_hex(16)}"
        self.events = RecentEvents(held_events)
        self.transport = StreamableHTTPServerTransport(
            self.id, event_store=self.events, retry_interval=RETRY_MS
        )
        self.established = False
        self.task: asyncio.Task[None] | None = None
        self.posts = self.streams = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.last_used_at = asyncio.get_running_loop().time()

    @contextmanager
    def in_use(self, *, stream: bool) -> Iterator[None]:
        """Count a request while the block runs."""
        self.streams += stream
        self.posts += not stream
        if self.posts:
            self.idle.clear()
        try:
            yield
        finally:
            self.last_used_at = asyncio.get_running_loop().time()
            self.streams -= stream
            self.posts -= not stream
            if not self.posts:
                self.idle.set()


class McpEngine:
    """Serves the requests that `McpEntry` recognises as standard MCP."""

    def __init__(self, sessions: SessionTable, tooling: Tooling, name: str, settings: ServerSettings) -> None:
        self._sessions = sessions
        self._tooling = tooling
        self._grace_s = settings.drain_s
        self._server = make_server(name, Handlers(sessions, tooling), tooling)
        self._stateless = StreamableHTTPSessionManager(
            self._server, max_request_body_size=settings.max_body_bytes
        )
        self._held_events = HeldEvents()
        self._hubs: dict[EnvironmentSession, Hub[_Connection]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._has_single_session = settings.mcp_single_session
        self._single_sessions: dict[str, EnvironmentSession] = {}  # by owner
        self._opening_single = asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Accept requests while the block runs; then close every stream and connection."""
        async with self._stateless.run():
            try:
                yield
            finally:
                tasks = []
                for hub in self._hubs.values():
                    hub.close()
                    tasks += [peer.task for peer in hub.peers.values() if peer.task is not None]
                await asyncio.gather(*(cancel_task(task) for task in tasks))

    async def drain(self, deadline: float) -> None:
        """Wait until the connections of ended sessions are closed; `deadline` is by the event loop's clock."""
        if self._closing:
            remaining = deadline - asyncio.get_running_loop().time()
            await asyncio.wait(self._closing, timeout=max(0.0, remaining))

    async def __call__(self, request: McpRequest, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            McpRequestRefusedError: It is refused before the SDK sees it.
            RefusalError: Likewise, by the table of sessions.
        """
        if not self._tooling.possible:
            raise _no_tools()
        if request.method == INITIALIZE and len(request.body) > _MAX_HELLO_BYTES:
            text = f"expected a handshake of at most {_MAX_HELLO_BYTES} bytes, got {len(request.body)}"
            raise McpRequestRefusedError(413, text)
        if request.version is not None and request.version not in HANDSHAKE_PROTOCOL_VERSIONS:
            await self._answer_stateless(request, receive, send)
        elif request.connection is not None:
            await self._answer_connected(request, request.connection, receive, send)
        elif request.http == "POST" and request.method == INITIALIZE:
            _check_hello(request)
            await self._initialize(request, receive, send)
        else:
            text = (
                "the header mcp-session-id is missing; begin with initialize, or send "
                f"mcp-protocol-version: {MODERN_PROTOCOL_VERSIONS[-1]}"
            )
            raise McpRequestRefusedError(400, text)

    # Requests

    async def _answer_stateless(self, request: McpRequest, receive: Receive, send: Send) -> None:
        owner, session = request.owner, None
        if request.http == "POST" and request.version in MODERN_PROTOCOL_VERSIONS:
            if request.in_path is not None:
                session = self._sessions.find(owner, request.in_path)
            elif self._has_single_session and request.method != DISCOVER:
                session = await self._find_or_open_single_session(owner)
        is_named = request.in_path is not None or self._has_single_session
        hub = None if session is None else self._hub(session)
        scope = {**request.scope, KEY: RequestOrigin(owner, session, hub, named=is_named)}
        with nullcontext() if session is None else _hold_session(session):
            await self._stateless.handle_request(scope, request.replay(receive), send)

    async def _initialize(self, request: McpRequest, receive: Receive, send: Send) -> None:
        result = await while_connected(receive, self._find_or_open_session(request.owner, request.in_path))
        if result is None:
            raise McpRequestRefusedError(CLIENT_LEFT, "the client has left", jsonrpc.SERVER_ERROR)
        session, is_new = result
        with _hold_session(session):
            connection = None
            try:
                connection = await self._connect(session, owns=is_new)
                await self._handle_request(connection, request, receive, send)
            finally:
                if connection is None or not connection.established or connection.refused or session.ended:
                    if connection is not None:
                        self._close_connection(connection)
                    if is_new:
                        await self._sessions.close(session)

    async def _answer_connected(
        self, request: McpRequest, connection_id: str, receive: Receive, send: Send
    ) -> None:
        connection = None
        with suppress(RefusalError):
            session = self._sessions.find(request.owner, request.session)
            connection = self._hub(session).peers.get(connection_id)
        if (
            connection is None
            or not connection.established
            or connection.session.ended
            or request.in_path not in (None, connection.session.id)
        ):
            text = "the mcp-session-id names no connection of this caller"
            raise McpRequestRefusedError(404, text)
        last_event = request.headers.get("last-event-id")
        if request.http == "GET" and last_event and connection.events.after(last_event) is None:
            # The SDK would answer with a stream that ends at once, to which official clients would reconnect for
            # ever. On 404 a client would assume that its session has ended.
            text = (
                f"expected the Last-Event-ID of an event that is still kept, got {short(last_event)!r}; the events "
                "after it are lost"
            )
            raise McpRequestRefusedError(400, text)
        if request.http == "DELETE":
            self._close_connection(connection)
            if connection.owns_session:
                await self._sessions.close(connection.session)
            await Response()(request.scope, receive, send)
            return
        with _hold_session(connection.session):
            status = await self._handle_request(connection, request, receive, send)
        if status == 404:  # the SDK has ended the connection
            self._close_connection(connection)

    async def _handle_request(
        self, connection: _Connection, request: McpRequest, receive: Receive, send: Send
    ) -> int:
        """Pass a request on a connection to the SDK; return the response's status."""

        def start(status: int) -> None:
            connection.established |= status < 400

        session, stream = connection.session, request.http == "GET"
        replies = Replies(send, connection.events, start, answers=not stream)
        scope = {**request.scope, KEY: RequestOrigin(session.owner, session, connection.hub, connection)}
        with connection.in_use(stream=stream):
            await connection.transport.handle_request(scope, request.replay(receive), replies)
        return replies.status

    # Sessions

    async def _find_or_open_session(
        self, owner: str, session_id: str | None
    ) -> tuple[EnvironmentSession, bool]:
        """Return the session of an id or, without one, a new session; and whether it is new."""
        if session_id is not None:
            return self._sessions.find(owner, session_id), False
        if self._has_single_session:
            return await self._find_or_open_single_session(owner), False
        return await self._open_session(owner), True

    async def _find_or_open_single_session(self, owner: str) -> EnvironmentSession:
        """Return the session that all requests without one share; a new one at the first, and after its end."""
        async with self._opening_single:
            session = self._single_sessions.get(owner)
            if session is None or session.ended:
                self._single_sessions[owner] = session = await self._open_session(owner)
            return session

    async def _open_session(self, owner: str) -> EnvironmentSession:
        """Open a session and reset it."""
        session = await self._sessions.open(owner)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._sessions.close, session)
            if not self._tooling.has_tools(session):
                raise _no_tools()
            try:
                await answer_request(session, Reset({}))  # marks it as used before the first await
            except RefusalError:
                raise
            except FATAL as error:
                text = report_error(error)
                raise McpRequestRefusedError(500, text, jsonrpc.INTERNAL_ERROR) from None
            undo.pop_all()
        return session

    def _hub(self, session: EnvironmentSession) -> Hub[_Connection]:
        hub = self._hubs.get(session)
        if hub is None:
            hub = Hub[_Connection]()
            if session.ended:  # `on_end` would never be called
                hub.close()
            else:
                self._hubs[session] = hub
                session.on_end = lambda: self._close_session(session)
        return hub

    def _close_session(self, session: EnvironmentSession) -> None:
        """Close the hub and the connections of a session that has ended."""
        hub = self._hubs.pop(session)
        hub.close()
        for connection in list(hub.peers.values()):
            if connection.established:  # otherwise `_initialize` closes it
                self._close_connection(connection)

    # Connections

    async def _connect(self, session: EnvironmentSession, *, owns: bool) -> _Connection:
        hub = self._hub(session)
        if len(hub.peers) >= MAX_CONNECTIONS:
            unused = [
                peer
                for peer in hub.peers.values()
                if peer.established and not (peer.posts or peer.streams or peer.owns_session)
            ]
            if not unused:
                text = "the session has as many connections as it may have; try again later"
                raise McpRequestRefusedError(503, text, jsonrpc.SERVER_ERROR)
            self._close_connection(min(unused, key=lambda peer: peer.last_used_at))
        connection = _Connection(session, hub, owns_session=owns, held_events=self._held_events)
        hub.peers[connection.id] = connection
        ready = asyncio.Event()
        connection.task = keep(asyncio.create_task(self._serve(connection, ready)))
        try:
            await ready.wait()
        except BaseException:
            self._close_connection(connection)
            raise
        return connection

    async def _serve(self, connection: _Connection, ready: asyncio.Event) -> None:
        transport = connection.transport
        try:
            async with transport.connect() as (reading, writing):
                ready.set()
                await serve_loop(
                    self._server,
                    reading,
                    writing,
                    lifespan_state={},
                    session_id=connection.id,
                    init_options=self._server.create_initialization_options(CHANGES),
                )
        except Exception:
            logger.exception("a connection of the MCP SDK has failed")
        finally:
            ready.set()
            if not transport.is_terminated:
                await transport.terminate()

    def _close_connection(self, connection: _Connection) -> None:
        """Close a connection in the background, after the replies in flight on it."""
        if connection.hub.peers.pop(connection.id, None) is not None:
            task = keep(asyncio.create_task(self._end(connection)))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _end(self, connection: _Connection) -> None:
        await _wait_at_most(connection.idle.wait(), self._grace_s)  # for the replies in flight
        connection.close()
        await _wait_at_most(connection.transport.terminate(), CLOSE_TIMEOUT_S)
        if connection.task is not None:
            await cancel_task(connection.task)
        connection.events.clear()


def _check_hello(hello: McpRequest) -> None:
    """Raise McpRequestRefusedError for a handshake that the SDK would refuse, before a session is opened for it."""
    request = Request(hello.scope)
    if not all(check_accept_headers(request)):
        text = "expected a client that accepts both application/json and text/event-stream"
        raise McpRequestRefusedError(406, text)
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise McpRequestRefusedError(415, "expected the Content-Type application/json")
    try:
        message = json.loads(hello.body)
        jsonrpc_message_adapter.validate_python(message, by_name=False)
        InitializeRequest.model_validate(message, by_name=False)
    except ValidationError as error:
        text = f"expected a handshake of MCP, got: {describe_faults(error, 'request')}"
        raise McpRequestRefusedError(400, text, jsonrpc.INVALID_PARAMS) from None


def _no_tools() -> McpRequestRefusedError:
    text = "the environment offers no tools; it is served on /ws and plain HTTP"
    return McpRequestRefusedError(404, text, jsonrpc.INTERNAL_ERROR)


async def _wait_at_most(wait: Awaitable[object], seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wait


@contextmanager
def _hold_session(session: EnvironmentSession) -> Iterator[None]:
    """Keep a session from counting as idle while the block runs."""
    session.listeners += 1
    try:
        yield
    finally:
        session.listeners -= 1
        session.mark_used()
