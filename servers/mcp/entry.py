"""The entry to standard MCP: separates its requests from the released dialect's; imports the SDK at the first."""

import asyncio
import importlib
import logging
from typing import TYPE_CHECKING, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from openenv_core.protocol import jsonrpc
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from servers.execution import cancel_task
from servers.mcp.requests import MCP_PATH, McpRequest, McpRequestRefusedError, is_mcp
from servers.routes.http import json_answer, make_route, retry_headers, status_of
from servers.routes.jsonrpc import JsonRpc
from servers.sessions import SessionTable, UnknownSessionError
from servers.settings import ServerSettings
from servers.tooling import Tooling

if TYPE_CHECKING:
    from servers.mcp.engine import McpEngine

logger = logging.getLogger("servers")

_IMPORT_TIMEOUT_S: Final = 60.0
"""Seconds that the import of the SDK may take; usually it takes one."""

_MISSING: Final = "standard MCP needs the package mcp; on the server: pip install 'ropewalk[mcp]'"


class McpEntry:
    """Serves HTTP requests to /mcp: those of standard MCP by its engine, those of the released dialect by `rpc`."""

    def __init__(
        self, sessions: SessionTable, tooling: Tooling, rpc: JsonRpc, name: str, settings: ServerSettings
    ) -> None:
        self._engine_args = (sessions, tooling, name, settings)
        self._metrics = sessions.metrics
        self._rpc = rpc
        self._loading: asyncio.Future[McpEngine] | None = None
        self._task: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        """Return the routes of /mcp and of the sessions below it."""
        paths = (MCP_PATH, f"{MCP_PATH}/{{session_id}}")
        return [make_route(path, self, "GET", "POST", "DELETE") for path in paths]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if not is_mcp(scope):
            raise HTTPException(404)
        # `servers.security` has already read the whole body.
        body = (await receive()).get("body", b"") if scope["method"] == "POST" else b""
        if self._metrics.enabled:
            self._metrics.count_received(body)
            send = self._metrics.counting(send)
        request = McpRequest(scope, body)
        if not request.standard:
            if request.http != "POST":
                raise HTTPException(405, headers={"Allow": "POST"})
            response = await self._rpc.serve(Request(scope, request.replay(receive)))
            await response(scope, receive, send)
            return
        try:
            engine = await self._load()
            await engine(request, receive, send)
        except McpRequestRefusedError as refused:
            await _refusal(request, refused.status, refused.fault)(scope, receive, send)
        except RefusalError as refusal:  # by the table of sessions
            unknown = isinstance(refusal, UnknownSessionError)
            code = jsonrpc.INVALID_REQUEST if unknown else jsonrpc.SERVER_ERROR
            fault = JsonRpcFaultError(code, refusal.message, refusal.extra or None)
            await _refusal(request, status_of(refusal), fault)(scope, receive, send)

    async def drain(self, deadline: float) -> None:
        """Wait until the connections of ended sessions are closed; `deadline` is by the event loop's clock."""
        if self._loading is not None and self._loading.done():
            await self._loading.result().drain(deadline)

    async def stop(self) -> None:
        """Stop the engine; a later request starts it again."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_task(task)

    async def _load(self) -> "McpEngine":
        # If the app's lifespan is not run, requests may come from one event loop after another.
        loop = asyncio.get_running_loop()
        if self._loading is None or self._loading.get_loop() is not loop:
            self._loading = loop.create_future()
            self._task = asyncio.create_task(self._run(self._loading), name="standard MCP")
        return await asyncio.shield(self._loading)

    async def _run(self, loading: "asyncio.Future[McpEngine]") -> None:
        """Import the engine and run it until the task is cancelled."""
        try:
            # In a thread: the import takes a second, and the event loop must serve other requests meanwhile.
            async with asyncio.timeout(_IMPORT_TIMEOUT_S):
                module = await asyncio.to_thread(importlib.import_module, "servers.mcp.engine")
            engine: McpEngine = module.McpEngine(*self._engine_args)
            async with engine.running():
                loading.set_result(engine)
                await asyncio.get_running_loop().create_future()
        except ImportError as error:
            logger.error("standard MCP cannot be served: %s", error)
            loading.set_exception(McpRequestRefusedError(501, _MISSING, jsonrpc.INTERNAL_ERROR))
        except Exception as error:
            if loading.done():
                raise
            loading.set_exception(error)
        finally:
            loading.cancel()
            self._loading = None


def _refusal(request: McpRequest, status: int, fault: JsonRpcFaultError) -> Response:
    return json_answer(jsonrpc.encode_fault(request.request_id, fault), status, retry_headers(status))
