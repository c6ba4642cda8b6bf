"""Raw requests of standard MCP clients, for what official clients never send."""

from typing import Any

import httpx
from mcp_hosts import STATELESS, host
from serving import open_session, request

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
    """Return a client with a session: of the handshake's making, or opened before where the wire is stateless."""
    path = f"/mcp/{await open_session(address)}" if era == STATELESS else "/mcp"
    return host(address, path, era, **options)


def tool_call(tool: str, **arguments: Any) -> dict[str, Any]:
    params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": "p"}}
    return {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": params}


def engine_of(app: EnvironmentApp) -> McpEngine:
    """Return what speaks standard MCP for an app, which is loaded with the first request for it."""
    loading = app._ensure_built().mcp._loading
    assert loading is not None
    engine: McpEngine = loading.result()
    return engine
