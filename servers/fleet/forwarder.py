"""Forwards requests for a session of another worker to that worker, which the session's id determines."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from openenv_core.protocol.batch import RESUME, SNAPSHOT
from openenv_core.protocol.errors import RefusalError
from servers.fleet.peers import UnixPeers
from servers.mcp.requests import INITIALIZE, MCP_PATH, McpRequest, is_mcp, read_rpc
from servers.page import PAGE_PATH
from servers.page.manager import WEB_SESSION
from servers.routes.http import NEW, path_of, requested_session_id
from servers.routes.websocket import SESSION_PATH
from servers.security import replay
from servers.sessions import new_session_id


def worker_of(session_id: str, workers: int) -> int:
    """Return the index of a session's worker."""
    return zlib.crc32(session_id.encode(errors="surrogatepass")) % workers


def ids_of(worker: int, workers: int) -> Callable[[], str]:
    """Return a function that draws session ids of one worker, on average from as many uuid4s as there are workers."""

    def draw() -> str:
        while worker_of(session_id := new_session_id(), workers) != worker:
            pass
        return session_id

    return draw


_STEPS = ("/reset", "/step", "/state")
_PAGE = f"{PAGE_PATH}/"
"""All requests of a page go to one worker: a Gradio page keeps its visitors' state in its process."""
_WATCH = "/ws/ui"
_SOCKETS = (SESSION_PATH, MCP_PATH)
_CREATE = "openenv/session/create"
_MARKS = (b"session", b"\\")
"""A body without any of these names neither a session nor the method above, not even escaped."""


@dataclass(kw_only=True)
class Forwarder:
    """ASGI middleware in front of a worker's application.

    Requests on this worker's private socket have already been forwarded and are never forwarded again.

    Attributes:
        app: This worker's application.
        index: This worker's index.
        workers: Number of workers.
        private: The path of this worker's private socket.
        peers: The connections to the other workers.
        find_free_worker: Returns a worker with room for a new session if this one has none, otherwise None.
    """

    app: ASGIApp
    index: int
    workers: int
    private: str
    peers: UnixPeers
    find_free_worker: Callable[[], int | None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection here, or forward it to its worker."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            await self.peers.close()
            return
        server, worker = scope.get("server"), None
        if server is None or server[0] != self.private:  # the public socket may be a Unix socket too
            if scope["type"] == "websocket":
                worker = self._place_socket(scope)
            elif (path := path_of(scope)).startswith(_PAGE):
                worker = self._worker_for(_named_session(scope) or WEB_SESSION)
            elif path in _STEPS:
                worker = self._worker_for(_named_session(scope))
            elif is_mcp(scope):
                body = b""
                if scope["method"] == "POST":  # the guard has read the body whole and limited its size
                    body = (await receive()).get("body", b"")
                    receive = replay(body, receive)
                worker = self._place_mcp(scope, body)
        if worker is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self.peers.socket(worker, scope, receive, send)
        else:
            await self.peers.http(worker, scope, receive, send)

    def _place_socket(self, scope: Scope) -> int | None:
        """Return the worker for a WebSocket; None to serve it here."""
        path = path_of(scope)
        if path == _WATCH:
            return self._worker_for(WEB_SESSION)
        if path not in _SOCKETS:
            return None
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        keys = ("session_id", RESUME, SNAPSHOT) if path == SESSION_PATH else ()
        return self._worker_for(next((query[key][0] for key in keys if key in query), None))

    def _place_mcp(self, scope: Scope, body: bytes) -> int | None:
        """Return the worker for a request to /mcp; None to serve it here, as when it has no session and opens none."""
        request = McpRequest(scope, body)
        if request.standard:
            opens, session = request.method == INITIALIZE, request.session
        else:
            rpc = read_rpc(body) if any(mark in body for mark in _MARKS) else {}
            params = rpc.get("params")
            session = params.get("session_id") if isinstance(params, dict) else None
            opens = rpc.get("method") == _CREATE
            if not isinstance(session, str):
                session = None  # the application reports the error
        return self._worker_for(session) if session or opens else None

    def _worker_for(self, session: str | None) -> int | None:
        """Return the worker to forward a connection to; None to serve it here."""
        if session is None or session == NEW:
            return self.find_free_worker()
        worker = worker_of(session, self.workers)
        return worker if worker != self.index else None


def _named_session(scope: Scope) -> str | None:
    """Return the session that a request names, read as the application reads it."""
    try:
        return requested_session_id(Request(scope))
    except RefusalError:
        return None  # the application reports the error
