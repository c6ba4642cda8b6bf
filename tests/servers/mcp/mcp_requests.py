"""Raw requests of standard MCP clients, for what official clients never send."""

import asyncio
from typing import Any

import httpx
from mcp.client.client import Client
from mcp_hosts import STATELESS, host
from serving import WAIT_TIMEOUT_S, open_session, request

from servers.app import EnvironmentApp
from servers.mcp.engine import McpEngine

STREAMS = {"accept": "application/json, text/event-stream"}
HELLO: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 7,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}
LISTING = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}


async def greet(address: str, path: str = "/mcp", **headers: str) -> httpx.Response:
    """Send the handshake's first request."""
    return await request(address, "POST", path, HELLO, STREAMS | headers)


async def connected(address: str, era: str, **options: Any) -> Any:
    """Return a client with a session, opened by the handshake, or beforehand for stateless clients."""
    path = f"/mcp/{await open_session(address)}" if era == STATELESS else "/mcp"
    return host(address, path, era, **options)


async def start_call(client: Client, tool: str, **arguments: Any) -> "asyncio.Task[Any]":
    """Start a call of a tool that reports progress; return its task once the tool runs."""
    started = asyncio.Event()

    async def progress(*_: Any) -> None:
        started.set()

    call = asyncio.create_task(client.call_tool(tool, arguments, progress_callback=progress))
    await asyncio.wait_for(started.wait(), WAIT_TIMEOUT_S)
    return call


def tool_call(tool: str, **arguments: Any) -> dict[str, Any]:
    params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": "p"}}
    return {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": params}


def engine_of(app: EnvironmentApp) -> McpEngine:
    """Return the MCP engine of an app, which is loaded with the first standard request."""
    loading = app.mcp._loading
    assert loading is not None
    engine: McpEngine = loading.result()
    return engine
