"""A server's list of tools, page by page, and no longer than a policy can be given."""

import time
from collections.abc import Awaitable, Callable
from typing import Final

import mcp_types as types

from .answers import too_long

MAX_TOOLS: Final = 1024
"""Of one server: a list that never ends is cut here."""

MAX_LIST_BYTES: Final = 4 << 20
"""Likewise."""

MAX_PAGES: Final = 64


async def listed(
    page: Callable[[str | None, float], Awaitable[types.ListToolsResult]], timeout_s: float
) -> list[types.Tool]:
    """Return the tools of all pages.

    Args:
        page: Asks for the page at a cursor, within seconds.
        timeout_s: What all of it may take.

    Raises:
        CallFailed: A page does not come, or not in time.
    """
    deadline = time.monotonic() + timeout_s
    found: list[types.Tool] = []
    size = 0
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        if (left_s := deadline - time.monotonic()) <= 0:
            raise too_long(timeout_s)
        answer = await page(cursor, left_s)
        for tool in answer.tools:
            size += len(tool.model_dump_json())
            if len(found) >= MAX_TOOLS or size > MAX_LIST_BYTES:
                return found
            found.append(tool)
        cursor = answer.next_cursor
        if cursor is None:
            break
    return found
