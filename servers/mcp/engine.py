"""Standard MCP over HTTP: finds the session of each request, and has the SDK answer it."""

import asyncio
import logging
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from starlette.types import Message, Scope

from openenv_core.protocol import jsonrpc
from openenv_core.protocol.errors import RefusalError, short
from openenv_core.protocol.http import SESSION_ID
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from servers.execution import CLOSE_TIMEOUT_S, FATAL, end, keep
from servers.mcp.context import KEY, RequestSeat
from servers.mcp.handlers import Handlers
from servers.mcp.links import Hub, Links, McpConnection, TooManyConnectionsError
from servers.mcp.replies import RETRY_MS, Replies, StreamEvents
from servers.mcp.requests import (
    CONNECTION_HEADER,
    DISCOVER,
    HANDLES,
    INITIALIZE,
    Exchange,
    McpRequest,
    McpRequestRefusedError,
    no_session,
    no_tools,
    refused_by,
)
from servers.mcp.server import make_server
from servers.routes.answers import reported
from servers.routes.http import NEW
from servers.sessions import EnvironmentSession, SessionTable
from servers.settings import ServerSettings
from servers.tooling import Tooling


class Opening:
    """Finds sessions, and opens them: those that it opens have been reset.

    Args:
        sessions: Where sessions come from.
        tooling: Says whether they have tools.
    """

    def __init__(self, sessions: SessionTable, tooling: Tooling) -> None:
        self._sessions = sessions
        self._tooling = tooling

    def check(self, asked: McpRequest) -> None:
        """Refuse what no session could answer.

        Raises:
            McpRequestRefusedError: The environment has no tools, or the request names two sessions.
        """
        if not self._tooling.possible:
            raise no_tools()
        if asked.in_path is not None and asked.in_header not in (None, asked.in_path):
            text = "expected one session, got one in the path and another in the header X-OpenEnv-Session"
            raise McpRequestRefusedError(400, JsonRpcFaultError(jsonrpc.INVALID_REQUEST, text))

    async def of_request(self, asked: McpRequest, owner: str) -> EnvironmentSession | None:
        """Return the session that a request of the stateless wire names; None where it names none.

        Raises:
            McpRequestRefusedError: It is not there, or cannot be opened.
        """
        if asked.in_path is not None:
            return self._find(owner, asked.in_path)
        if asked.in_header is None or asked.method == DISCOVER:
            return None
        return (await self._find_or_open(owner, asked.in_header))[0]

    async def of_connection(self, asked: McpRequest, owner: str) -> tuple[EnvironmentSession, bool]:
        """Return the session of a new connection, and whether it was opened for it.

        Raises:
            McpRequestRefusedError: It is not there, or cannot be opened.
        """
        if asked.in_path is not None:
            return self._find(owner, asked.in_path), False
        return await self._find_or_open(owner, asked.in_header)

    def _find(self, owner: str, wanted: str) -> EnvironmentSession:
        try:
            return self._sessions.find(owner, wanted)
        except RefusalError as refusal:
            raise refused_by(refusal) from None

    async def _find_or_open(self, owner: str, wanted: str | None) -> tuple[EnvironmentSession, bool]:
        if wanted is not None and (wanted == NEW or SESSION_ID.fullmatch(wanted) is None):
            text = f"expected the id of a session in X-OpenEnv-Session, got {wanted[:128]!r}; {HANDLES}"
            raise McpRequestRefusedError(400, JsonRpcFaultError(jsonrpc.INVALID_PARAMS, text))
        if wanted is not None:
            with suppress(RefusalError):
                return self._sessions.find(owner, wanted), False
        try:
            session = await (
                self._sessions.open(owner) if wanted is None else self._sessions.find_or_open(owner, wanted)
            )
        except RefusalError as refusal:
            raise refused_by(refusal) from None
        if session.used:  # somebody else has opened it meanwhile
            return session, False
        try:
            await self._reset(session)  # it counts as used before anything waits
        except BaseException:
            await self._sessions.close(session)
            raise
        return session, True

    async def _reset(self, session: EnvironmentSession) -> None:
        if not self._tooling.has_tools(session.runner):
            raise no_tools()
        try:
            await self._sessions.call(session, lambda runner: runner.reset({}))
        except RefusalError as refusal:
            raise refused_by(refusal) from None
        except FATAL as error:
            raise McpRequestRefusedError(
                500, JsonRpcFaultError(jsonrpc.INTERNAL_ERROR, reported(error))
            ) from None


logger = logging.getLogger("servers")

FINAL_REPLY_TIMEOUT_S: Final = 1.0
"""Seconds for telling the calls of a session that its client closes."""

MAX_HELLO_BYTES: Final = 256 * 1024
"""Of the handshake, which is kept for as long as its connection."""


class McpEngine:
    """Serves what `McpEntry` takes for standard MCP.

    Args:
        sessions: Where sessions come from.
        tooling: How their tools are listed and called.
        name: What the environment is called.
        settings: The server's settings.
    """

    def __init__(self, sessions: SessionTable, tooling: Tooling, name: str, settings: ServerSettings) -> None:
        self._sessions = sessions
        self._grace_s = settings.drain_s
        self._opening = Opening(sessions, tooling)
        self._events = StreamEvents()
        self._manager = StreamableHTTPSessionManager(
            make_server(name, Handlers(sessions, tooling), tooling),
            # Connections are bounded by the sessions that they belong to, and end with them.
            session_idle_timeout=None,
            max_sessions=None,
            max_request_body_size=settings.max_body_bytes,
            event_store=self._events,
            retry_interval=RETRY_MS,
        )
        self._links = Links()
        self._hubs: dict[EnvironmentSession, Hub] = {}
        self._parting: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Be ready for requests."""
        ready = asyncio.Event()

        async def run() -> None:
            async with self._manager.run():
                ready.set()
                await self._stop.wait()

        self._task = asyncio.create_task(run(), name="the SDK's connections")
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([self._task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not ready.is_set():
            waiting.cancel()
            self._task.result()

    async def drain(self, deadline: float) -> None:
        """Wait until the connections of sessions that have ended are ended too.

        Args:
            deadline: On the loop's clock; it returns then in any case.
        """
        if self._parting:
            remaining = deadline - asyncio.get_running_loop().time()
            await asyncio.wait(self._parting, timeout=max(0.0, remaining))

    async def stop(self) -> None:
        """End everything that runs here."""
        for hub in self._hubs.values():
            hub.close()
        self._stop.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
            if not self._task.done():
                await end(self._task)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request.

        Raises:
            McpRequestRefusedError: It is not for the SDK.
        """
        asked = exchange.asked
        self._opening.check(asked)
        if asked.method == INITIALIZE and len(exchange.body) > MAX_HELLO_BYTES:
            text = f"expected a handshake of at most {MAX_HELLO_BYTES} bytes, got {len(exchange.body)}"
            raise McpRequestRefusedError(413, JsonRpcFaultError(jsonrpc.INVALID_REQUEST, text))
        if asked.version is not None and asked.version not in HANDSHAKE_PROTOCOL_VERSIONS:
            await self._stateless(exchange)
        elif asked.connection is not None:
            await self._connected(exchange, asked.connection)
        elif asked.http == "POST" and asked.method == INITIALIZE:
            await self._initialize(exchange)
        else:
            text = (
                "expected the header mcp-session-id of a connection, got none; begin with initialize, or send "
                f"mcp-protocol-version: {MODERN_PROTOCOL_VERSIONS[-1]}"
            )
            raise McpRequestRefusedError(400, JsonRpcFaultError(jsonrpc.INVALID_REQUEST, text))

    async def _stateless(self, exchange: Exchange) -> None:
        asked, owner = exchange.asked, exchange.owner
        session = None
        if asked.http == "POST" and asked.version in MODERN_PROTOCOL_VERSIONS:
            session = await self._opening.of_request(asked, owner)
        if session is None:
            named = asked.in_path is not None or asked.in_header is not None
            await self._pass(exchange, RequestSeat(owner, named=named))
            return
        with _using(session):
            await self._pass(exchange, RequestSeat(owner, session, self._hub(session)))

    async def _initialize(self, exchange: Exchange) -> None:
        opening = self._opening.of_connection(exchange.asked, exchange.owner)
        session, opened = await exchange.while_connected(opening)
        with _using(session):
            link = None
            try:
                link = self._link(session, owns=opened)
                await self._pass_on(link, exchange)
            finally:
                if link is None or not link.inner or link.refused or session.over:
                    if link is not None:
                        self._part(link)
                    if opened:
                        await self._sessions.close(session)

    def _link(self, session: EnvironmentSession, *, owns: bool) -> McpConnection:
        try:
            superfluous = self._links.superfluous(session)
        except TooManyConnectionsError:
            text = (
                "expected a session with room for another connection, got one that is full; try again later"
            )
            raise McpRequestRefusedError(
                503, JsonRpcFaultError(jsonrpc.SERVER_ERROR, text), retry=True
            ) from None
        if superfluous is not None:
            self._part(superfluous)
        link = McpConnection(session, owns=owns)
        self._links.add(link)
        return link

    async def _connected(self, exchange: Exchange, link_id: str) -> None:
        asked = exchange.asked
        link = self._links.find(exchange.owner, link_id)
        named = {asked.in_path, asked.in_header} - {None}
        if link is None or link.session.over or named - {link.session.id}:
            raise no_session("expected the mcp-session-id of a connection, got none of this caller's")
        _refuse_what_is_forgotten(asked, link)
        with _using(link.session):
            if asked.http == "DELETE":
                self._links.remove(link)
                if link.owns:
                    await self._sessions.close(link.session)
                    await _within(link.idle.wait(), FINAL_REPLY_TIMEOUT_S)
            status = await self._pass_on(link, exchange)
        if asked.http == "DELETE":
            self._unlist(link)
            link.peer.close()
            self._events.forget(link.kept)
        elif status == 404:  # the SDK has ended it
            self._part(link)

    async def _pass_on(self, link: McpConnection, exchange: Exchange) -> int:
        """Have the SDK answer a request on a connection; return the status."""
        session = link.session

        def drawn(inner: bytes) -> None:
            link.inner = inner
            self._hub(session).peers.add(link.peer)

        hub = self._hub(session)
        stream = exchange.asked.http == "GET"
        known = None if link.inner else drawn
        replies = Replies(exchange.send, link.id.encode(), known, answers=not stream)
        with link.in_use(stream=stream), self._events.of(link.kept):
            seat = RequestSeat(session.owner, session, hub, link.peer, link)
            await self._pass(exchange.on_connection(link.inner, replies), seat)
        return replies.status

    async def _pass(self, exchange: Exchange, seat: RequestSeat) -> None:
        scope = {**exchange.scope, KEY: seat}
        await self._manager.handle_request(scope, exchange.replayed(), exchange.send)

    def _hub(self, session: EnvironmentSession) -> Hub:
        hub = self._hubs.get(session)
        if hub is None:
            hub = Hub()
            if session.over:  # and would never tell again that it is
                hub.close()
            else:
                self._hubs[session] = hub
                session.on_over = lambda: self._over(session)
        return hub

    def _over(self, session: EnvironmentSession) -> None:
        """End what belongs to a session that has ended."""
        hub = self._hubs.pop(session, None)
        if hub is not None:
            hub.close()
        for link in self._links.of(session):
            if link.inner:  # or else whoever serves its handshake ends it
                self._part(link)

    def _part(self, link: McpConnection) -> None:
        """End a connection, after the replies that are under way on it."""
        if not self._links.remove(link):
            return  # it ends already
        self._unlist(link)
        if link.inner:
            task = keep(asyncio.create_task(self._delete(link)))
            self._parting.add(task)
            task.add_done_callback(self._parting.discard)

    def _unlist(self, link: McpConnection) -> None:
        """Let the changes of a session that goes on be no business of a connection that ends."""
        if (hub := self._hubs.get(link.session)) is not None:
            hub.peers.discard(link.peer)

    async def _delete(self, link: McpConnection) -> None:
        await _within(link.idle.wait(), self._grace_s)  # the replies under way
        link.peer.close()

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            pass

        scope: Scope = {
            "type": "http",
            "method": "DELETE",
            "path": "/mcp",
            "query_string": b"",
            "headers": [(CONNECTION_HEADER, link.inner)],
        }
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._manager.handle_request(scope, receive, send)
        except Exception:
            logger.exception("a connection of the MCP SDK could not be ended")
        self._events.forget(link.kept)


def _refuse_what_is_forgotten(asked: McpRequest, link: McpConnection) -> None:
    """Refuse to go on after an event that is not kept.

    The SDK would answer with a stream that ends at once, and official clients would come back to it for ever.

    Raises:
        McpRequestRefusedError: It is not. As 400: by 404 a client would take its session for ended.
    """
    if asked.http == "GET" and asked.last_event and link.kept.after(asked.last_event) is None:
        text = (
            "expected the Last-Event-ID of an event that is still kept, got "
            f"{short(asked.last_event)!r}; what came after it is not told again"
        )
        raise McpRequestRefusedError(400, JsonRpcFaultError(jsonrpc.INVALID_REQUEST, text))


async def _within(wait: Awaitable[object], seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wait


@contextmanager
def _using(session: EnvironmentSession) -> Iterator[None]:
    """Keep a session from going unused for as long as the block runs."""
    session.listeners += 1
    try:
        yield
    finally:
        session.listeners -= 1
        session.last_use = asyncio.get_running_loop().time()
