"""Conversion of a tool server's replies: results, errors and lists of tools."""

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult

from openenv_core.protocol.jsonio import dumps
from openenv_core.tools import ContentBlock, ToolError, ToolErrorType, ToolResult

from .errors import CallError, describe_error

CUT: Final = "cut"
"""The observation metadata key that says how much of a result was cut off."""

_WRAPPED: Final = "result"


def result_of(answer: CallToolResult, max_bytes: int) -> ToolResult:
    """Convert a call's reply to a tool result, truncated to `max_bytes`.

    The value is the structured content, if any, else the text of a single text block, else the content. A plain value
    that the server's SDK wrapped in `{"result": ...}`, because structured content must be an object, is unwrapped.
    """
    content: list[ContentBlock] = [
        block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in answer.content
    ]
    structured = answer.structured_content if isinstance(answer.structured_content, dict) else None
    size = _size(content) + (0 if structured is None else len(dumps(structured)))
    metadata: dict[str, Any] = {}
    if size > max_bytes:
        content, structured = _truncate_content(content, max_bytes), None
        metadata[CUT] = {"bytes": size, "kept": _size(content)}
    if answer.is_error:
        message = _join_texts(content) or "the tool failed, and did not say why"
        return ToolResult(
            content=content,
            structured=structured,
            error=ToolError(error_type=ToolErrorType.EXECUTION_ERROR, message=message),
            metadata=metadata,
        )
    return ToolResult(
        content=content, structured=structured, value=_extract_value(content, structured), metadata=metadata
    )


def _extract_value(content: list[ContentBlock], structured: dict[str, Any] | None) -> Any:
    if structured is not None:
        return structured[_WRAPPED] if _is_wrapped(structured, content) else structured
    if not content:
        return None
    if len(content) == 1 and content[0]["type"] == "text":
        return content[0]["text"]
    return content


def _is_wrapped(structured: dict[str, Any], content: list[ContentBlock]) -> bool:
    """Return whether structured content wraps a plain value: then the text next to it is that of the bare value."""
    if set(structured) != {_WRAPPED}:
        return False
    if len(content) != 1 or content[0]["type"] != "text":
        return True
    try:
        return bool(json.loads(content[0]["text"]) != structured)
    except (ValueError, RecursionError):
        return True


def _join_texts(content: list[ContentBlock]) -> str:
    return "\n".join(block["text"] for block in content if block["type"] == "text")


def _size(content: list[ContentBlock]) -> int:
    return sum(len(dumps(block)) for block in content)


def _truncate_content(content: list[ContentBlock], max_bytes: int) -> list[ContentBlock]:
    """Keep the blocks that fit, in order: texts are truncated, other blocks kept whole or replaced by a note."""
    blocks: list[ContentBlock] = []
    bytes_left = max_bytes
    for block in content:
        size = len(dumps(block))
        if size <= bytes_left:
            blocks.append(block)
        elif block["type"] == "text" and bytes_left > 0:
            cut = block["text"].encode(errors="replace")[:bytes_left].decode(errors="ignore")
            blocks.append({"type": "text", "text": cut})
            size = bytes_left
        else:
            blocks.append({"type": "text", "text": f"[{block['type']} of {size} bytes left out]"})
            size = 0
        bytes_left -= size
        if len(blocks) >= 1024:
            break
    return blocks


def make_timeout_error(timeout_s: float) -> CallError:
    """Return the error of a call that timed out; not an infrastructure error, as its arguments may be the cause."""
    message = f"expected an answer within {timeout_s:g} s, got none; the server was told to stop"
    return CallError(ToolErrorType.TIMEOUT, message)


def make_server_error(reason: str) -> CallError:
    """Return the error of a call whose server failed."""
    return CallError(ToolErrorType.TRANSPORT_ERROR, f"the tool server failed: {reason}", infrastructure=True)


def make_refusal_error(error: MCPError) -> CallError:
    """Return the error of a call that the server rejected."""
    kind = ToolErrorType.EXECUTION_ERROR
    if error.code == types.INVALID_PARAMS:
        kind = ToolErrorType.INVALID_ARGS
    return CallError(kind, describe_error(error))


MAX_TOOLS: Final = 1024
"""The maximum number of tools of a server; the rest of a longer, or endless, list is ignored."""

MAX_LIST_BYTES: Final = 4 << 20
"""The maximum size of a server's list of tools; the rest is ignored."""

MAX_PAGES: Final = 64


async def collect_tools(
    list_page: Callable[[str | None, float], Awaitable[types.ListToolsResult]], timeout_s: float
) -> list[types.Tool]:
    """Return the tools of all pages.

    Raises:
        CallError: A page could not be fetched, or not in time.
    """
    deadline = time.monotonic() + timeout_s
    tools: list[types.Tool] = []
    size = 0
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        if (left_s := deadline - time.monotonic()) <= 0:
            raise make_timeout_error(timeout_s)
        answer = await list_page(cursor, left_s)
        for tool in answer.tools:
            size += len(tool.model_dump_json())
            if len(tools) >= MAX_TOOLS or size > MAX_LIST_BYTES:
                return tools
            tools.append(tool)
        cursor = answer.next_cursor
        if cursor is None:
            break
    return tools
