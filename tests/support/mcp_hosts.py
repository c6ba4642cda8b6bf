"""The official MCP client, connected to a server's /mcp."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

HANDSHAKE = "legacy"
STATELESS = "2026-07-28"
WAIT_TIMEOUT_S = 60.0


@asynccontextmanager
async def host(
    address: str,
    path: str = "/mcp",
    mode: str = HANDSHAKE,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[Client]:
    async with httpx2.AsyncClient(
        headers=headers or {}, timeout=WAIT_TIMEOUT_S, trust_env=False, verify=False
    ) as http:
        transport = streamable_http_client(f"http://{address}{path}", http_client=http)
        async with Client(transport, mode=mode, read_timeout_seconds=WAIT_TIMEOUT_S, **options) as client:
            yield client


def text_of(result: Any) -> str:
    return str(result.content[0].text)
