"""Serves an app on a real socket from inside a test's own loop, so that the test can look into it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from websockets.asyncio.client import ClientConnection, connect

from servers.app import EnvironmentApp
from servers.hosting import SETTINGS

PATIENCE_S = 20


@asynccontextmanager
async def serving(app: EnvironmentApp, **settings: Any) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="warning", **{**SETTINGS, **settings})
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await eventually(lambda: server.started)
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def socket_to(address: str, query: str = "") -> AsyncIterator[ClientConnection]:
    async with connect(f"ws://{address}/ws{query}", compression=None, proxy=None) as connection:
        yield connection


async def ask(connection: ClientConnection, frame: Any) -> Any:
    await connection.send(frame if isinstance(frame, str | bytes) else json.dumps(frame))
    return json.loads(await asyncio.wait_for(connection.recv(), PATIENCE_S))


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for knows no event
            await asyncio.sleep(0.005)
