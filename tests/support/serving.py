"""Serves an app on a real socket in the test's event loop, so that the test can inspect it."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import httpx
import pytest
import uvicorn
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from servers.app import EnvironmentApp
from servers.hosting import SETTINGS

WAIT_TIMEOUT_S = 60


class _Prompt(uvicorn.Server):
    """A server that stops at once; uvicorn polls ten times a second, which adds up over hundreds of tests."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.stop.wait()


@asynccontextmanager
async def serving(
    app: EnvironmentApp, place: socket.socket | None = None, **settings: Any
) -> AsyncIterator[str]:
    """Serve an app; several servers, one after another, can use the same listening socket `place`."""
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


def reconfigured(app: EnvironmentApp, **settings: Any) -> EnvironmentApp:
    """Return an app that serves the same with other settings, as `ropewalk serve` builds it."""
    return EnvironmentApp(app.served, replace(app.settings, **settings))


@contextmanager
def served(app: EnvironmentApp) -> Iterator[str]:
    """Serve an app in a thread of its own, for code without asyncio."""
    started: SimpleQueue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = SimpleQueue()

    async def serve() -> None:
        stop = asyncio.Event()
        async with serving(app) as address:
            started.put((address, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    address, loop, stop = started.get(timeout=WAIT_TIMEOUT_S)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@asynccontextmanager
async def socket_to(
    address: str, query: str = "", path: str = "/ws", **options: Any
) -> AsyncIterator[ClientConnection]:
    url = f"ws://{address}{path}{query}"
    options = {"open_timeout": 60, **options}  # the default of 10 s is too short on a busy machine
    async with connect(url, compression=None, proxy=None, **options) as connection:
        yield connection


async def ask(connection: ClientConnection, frame: Any) -> Any:
    await connection.send(frame if isinstance(frame, str | bytes) else json.dumps(frame))
    return json.loads(await asyncio.wait_for(connection.recv(), WAIT_TIMEOUT_S))


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - conditions have no event
            await asyncio.sleep(0.005)


def http_client(address: str, **options: Any) -> httpx.AsyncClient:
    """Return a client for plain HTTP; loading the certificates would take longer than a request."""
    return httpx.AsyncClient(
        base_url=f"http://{address}", trust_env=False, timeout=WAIT_TIMEOUT_S, verify=False, **options
    )


async def request(
    address: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> httpx.Response:
    """Send a plain HTTP request; a body other than text or bytes is sent as JSON."""
    content = body if body is None or isinstance(body, str | bytes) else json.dumps(body)
    headers = {"content-type": "application/json", **(headers or {})}
    async with http_client(address, headers=headers) as http:
        return await http.request(method, path, content=content)


async def rpc(address: str, method: str, params: Any = None, **headers: str) -> Any:
    """Send a JSON-RPC request to POST /mcp; return the response."""
    call = {"jsonrpc": "2.0", "id": 1, "method": method} | ({} if params is None else {"params": params})
    reply = await request(address, "POST", "/mcp", call, headers)
    assert reply.status_code == 200
    return reply.json()


async def open_session(address: str, **headers: str) -> str:
    """Open a standing session; return its id."""
    reply = await rpc(address, "openenv/session/create", **headers)
    return str(reply["result"]["session_id"])


async def wait_close_code(connection: ClientConnection) -> int:
    """Wait until the server closes the connection; return the close code. A frame before that fails the test."""
    with pytest.raises(ConnectionClosed) as closed:
        await asyncio.wait_for(connection.recv(), WAIT_TIMEOUT_S)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code
