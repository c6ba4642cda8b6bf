"""Serves an app on a real socket from inside a test's own loop, so that the test can look into it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from servers.app import EnvironmentApp
from servers.hosting import SETTINGS

PATIENCE_S = 60


class _Prompt(uvicorn.Server):
    """Stops when it is told to, where uvicorn looks ten times a second: there are hundreds of tests."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.stop.wait()


@asynccontextmanager
async def serving(
    app: EnvironmentApp, place: socket.socket | None = None, **settings: Any
) -> AsyncIterator[str]:
    """Serve an app; at a place, a socket that listens, one server after another can be met."""
    with socket.create_server(("127.0.0.1", 0)) if place is None else place.dup() as listener:
        config = uvicorn.Config(app, log_level="warning", **{**SETTINGS, **settings})
        server = _Prompt(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await eventually(lambda: server.started or task.done())
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop.set()
            await task


@asynccontextmanager
async def socket_to(
    address: str, query: str = "", path: str = "/ws", **options: Any
) -> AsyncIterator[ClientConnection]:
    url = f"ws://{address}{path}{query}"
    options = {"open_timeout": 60, **options}  # by itself it gives up after 10 s, which a busy machine needs
    async with connect(url, compression=None, proxy=None, **options) as connection:
        yield connection


async def ask(connection: ClientConnection, frame: Any) -> Any:
    await connection.send(frame if isinstance(frame, str | bytes) else json.dumps(frame))
    return json.loads(await asyncio.wait_for(connection.recv(), PATIENCE_S))


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for knows no event
            await asyncio.sleep(0.005)


async def request(
    address: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> httpx.Response:
    """Ask over plain HTTP; a body that is neither text nor bytes is sent as JSON."""
    content = body if body is None or isinstance(body, str | bytes) else json.dumps(body)
    headers = {"content-type": "application/json", **(headers or {})}
    async with httpx.AsyncClient(
        base_url=f"http://{address}",
        trust_env=False,
        timeout=PATIENCE_S,
        headers=headers,
        verify=False,  # there is nothing to verify, and to read the certificates takes longer than to ask
    ) as http:
        return await http.request(method, path, content=content)


async def rpc(address: str, method: str, params: Any = None, **headers: str) -> Any:
    """Ask POST /mcp; return the response as it is."""
    call = {"jsonrpc": "2.0", "id": 1, "method": method} | ({} if params is None else {"params": params})
    reply = await request(address, "POST", "/mcp", call, headers)
    assert reply.status_code == 200
    return reply.json()


async def opened(address: str, **headers: str) -> str:
    """Open a session that stands by itself; return its id."""
    reply = await rpc(address, "openenv/session/create", **headers)
    return str(reply["result"]["session_id"])


async def closing_of(connection: ClientConnection) -> int:
    """Wait until the server closes; return its code. A frame before that fails the test."""
    with pytest.raises(ConnectionClosed) as closed:
        await asyncio.wait_for(connection.recv(), PATIENCE_S)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code
