"""The tools of an episode's environment over MCP: JSON-RPC by plain POST, without a session of its own."""

import logging
from collections.abc import Mapping
from typing import Any, Final

from rl_bridge.gateway.episode import ToolPort

VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol in which an answer is a plain JSON response; the first is offered to other clients."""

METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602

_log = logging.getLogger(__name__)


async def answer_mcp(tools: ToolPort, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Answer a request; returns None for a notification or a response, which get none."""
    if "id" not in request or "method" not in request:
        return None
    method, params = request["method"], request.get("params") or {}
    head = {"jsonrpc": "2.0", "id": request["id"]}
    if method == "initialize":
        wanted = params.get("protocolVersion")
        result: dict[str, Any] = {
            "protocolVersion": wanted if wanted in VERSIONS else VERSIONS[0],
            "capabilities": {"tools": {"listChanged": False}},
            "serverInfo": {"name": "ropewalk", "version": "1"},
        }
    elif method == "ping":
        result = {}
    elif method == "tools/list":
        result = {"tools": [_to_mcp(function["function"]) for function in tools.functions]}
    elif method == "tools/call":
        name, arguments = params.get("name"), params.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            return head | _error(INVALID_PARAMS, "expected the name of a tool and an object of arguments")
        text, failed = await tools.call(name, arguments)
        result = {"content": [{"type": "text", "text": text}], "isError": failed}
    else:
        return head | _error(METHOD_NOT_FOUND, f"expected a method of tools, got {method!r:.60}")
    return head | {"result": result}


def _to_mcp(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {"name": function["name"], "description": function.get("description", ""), "inputSchema": schema}


def _error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}
