"""Drops what is not MCP from a tool server's replies, so that one wrong tool or block does not spoil the others."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from mcp.client import Transport
from mcp_types import JSONRPCResponse
from mcp_types.methods import validate_server_result
from pydantic import ValidationError

logger = logging.getLogger(__name__)


@asynccontextmanager
async def drop_invalid_entries(transport: Transport, version: Callable[[], str]) -> AsyncIterator[Any]:
    """Enter a transport, and check what is read from it.

    Args:
        transport: The transport to a tool server.
        version: Returns the negotiated protocol version.
    """
    async with transport as (read, write):
        yield _CheckedStream(read, version), write


class _CheckedStream:
    """The read stream of a transport, with the invalid entries of its replies dropped."""

    def __init__(self, inner: Any, version: Callable[[], str]) -> None:
        self._inner = inner
        self._version = version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def __aenter__(self) -> "_CheckedStream":
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        ended: bool | None = await self._inner.__aexit__(*error)
        return ended

    def __aiter__(self) -> "_CheckedStream":
        return self

    async def __anext__(self) -> Any:
        return self._check(await self._inner.__anext__())

    async def receive(self) -> Any:
        return self._check(await self._inner.receive())

    def _check(self, item: Any) -> Any:
        if isinstance(response := getattr(item, "message", None), JSONRPCResponse):
            check_result(response.result, self._version())
        return item


def check_result(result: dict[str, Any], version: str) -> None:
    """Drop the tools of a list, and replace the blocks of a call's result, that are not as MCP defines them."""
    if isinstance(tools := result.get("tools"), list) and _find_fault("tools", result, version):
        result["tools"] = []
        for tool in tools:
            if (fault := _find_fault("tools", {**result, "tools": [tool]}, version)) is None:
                result["tools"].append(tool)
            else:
                name = tool.get("name") if isinstance(tool, dict) else None
                logger.warning("the tool %.100r is left out, as it is not one of MCP: %s", name, fault)
    elif isinstance(blocks := result.get("content"), list) and _find_fault("content", result, version):
        for index, block in enumerate(blocks):
            if _find_fault("content", {**result, "content": [block]}, version) is not None:
                kind = block.get("type") if isinstance(block, dict) else None
                text = f"[left out, as it is no content block of MCP: type {kind!r:.100}]"
                blocks[index] = {"type": "text", "text": text}


def _find_fault(key: str, result: dict[str, Any], version: str) -> str | None:
    """Return what is wrong with a result; None if it is valid."""
    try:
        validate_server_result("tools/list" if key == "tools" else "tools/call", version, result)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"[:300]
    except KeyError:  # the version has no such method
        pass
    return None
