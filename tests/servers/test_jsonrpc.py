"""JSON-RPC, the same on POST /mcp, on the socket /mcp and in the mcp frames of /ws."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest
from counter import Add, AsyncCounter, Count, Counter, Unbuildable
from serving import ask, closing_of, eventually, opened, request, serving, socket_to

from servers import create_app

Ask: TypeAlias = Callable[[Any], Awaitable[Any]]

OK = {"jsonrpc": "2.0", "id": 7, "method": "tools/list"}


@asynccontextmanager
async def over(transport: str, address: str) -> AsyncIterator[Ask]:
    if transport == "POST":

        async def post(value: Any) -> Any:
            reply = await request(address, "POST", "/mcp", value)
            assert reply.status_code == 200
            assert reply.headers["content-type"] == "application/json"
            return reply.json()

        yield post
        return
    async with socket_to(address, path="/mcp" if transport == "socket" else "/ws") as ws:

        async def send(value: Any) -> Any:
            if transport == "socket":
                return await ask(ws, value)
            reply = await ask(ws, {"type": "mcp", "data": value})
            assert reply["type"] == "mcp"
            return reply["data"]

        yield send


TRANSPORTS = ["POST", "socket", "frames"]


@pytest.mark.parametrize(
    ("value", "request_id", "code"),
    [
        ({**OK, "jsonrpc": "1.0"}, None, -32600),
        ({"id": 7, "method": "tools/list"}, None, -32600),
        ({"jsonrpc": "2.0", "id": 7}, None, -32600),
        ({**OK, "method": 5}, None, -32600),
        ({**OK, "more": 1}, None, -32600),
        ({**OK, "id": 1.5}, None, -32600),
        ({**OK, "id": [1]}, None, -32600),
        ({**OK, "id": True}, None, -32600),
        ({**OK, "params": [1]}, None, -32600),
        ({**OK, "params": None}, None, -32600),
        ({**OK, "method": "no/such"}, 7, -32601),
        ({**OK, "method": "tools/call"}, 7, -32602),
        ({**OK, "method": "tools/call", "params": {"name": 5}}, 7, -32602),
        ({**OK, "method": "openenv/session/close"}, 7, -32602),
        ({**OK, "method": "openenv/session/close", "params": {"session_id": "abc"}}, 7, -32602),
        ({**OK, "method": "openenv/session/close", "params": {"session_id": [1]}}, 7, -32602),
        (OK, 7, -32603),
        ({**OK, "id": "seven"}, "seven", -32603),
        ({**OK, "id": None}, None, -32603),
        ({"jsonrpc": "2.0", "method": "tools/list"}, None, -32603),
        ({**OK, "method": "tools/call", "params": {"name": "t", "arguments": {}}}, 7, -32603),
    ],
    ids=repr,
)
@pytest.mark.parametrize("env", [Counter, AsyncCounter], ids=lambda e: e.__name__)
async def test_errors(env: type[Counter], value: Any, request_id: Any, code: int) -> None:
    async with serving(create_app(env, Add, Count, max_concurrent_envs=4)) as address:
        for transport in TRANSPORTS:
            async with over(transport, address) as send:
                for _ in range(2):  # the socket lives
                    reply = await send(value)
                    assert set(reply) == {"jsonrpc", "id", "error"}
                    assert (reply["jsonrpc"], reply["id"]) == ("2.0", request_id)
                    assert reply["error"]["code"] == code
                    assert reply["error"]["message"]
                    assert reply["error"]["data"] is None


@pytest.mark.parametrize(
    "text", ["{", "", "[]", f"[{json.dumps(OK)}]", "5", "null", '{"jsonrpc":NaN}', "[" * 100_000, "\ud800"]
)
async def test_what_is_no_single_request(text: str) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    async with serving(create_app(Counter, Add, Count, max_concurrent_envs=4)) as address:
        reply = (await request(address, "POST", "/mcp", raw)).json()
        assert (reply["id"], reply["error"]["code"], reply["error"]["data"]) == (None, -32700, None)
        async with socket_to(address, path="/mcp") as ws:
            for frame in (raw, *([text] if text.isascii() else [])):
                assert (await ask(ws, frame))["error"]["code"] == -32700
            assert (await ask(ws, OK))["id"] == 7


async def test_an_unknown_session_is_named() -> None:
    async with serving(create_app(Counter, Add, Count)) as address:
        for method in ("tools/list", "tools/call"):
            call = {**OK, "method": method, "params": {"name": "t", "session_id": "abc"}}
            reply = (await request(address, "POST", "/mcp", call)).json()
            assert reply["error"] == {"code": -32602, "message": "Unknown session_id: abc", "data": None}


async def test_capacity() -> None:
    app = create_app(Counter, Add, Count)
    async with serving(app) as address:
        session = await opened(address)
        full = {"active_sessions": 1, "max_sessions": 1}
        reply = (await request(address, "POST", "/mcp", {**OK, "method": "openenv/session/create"})).json()
        assert (reply["error"]["code"], reply["error"]["data"]) == (-32000, full)
        async with socket_to(address, path="/mcp") as ws:
            reply = json.loads(await ws.recv())
            assert (reply["id"], reply["error"]["code"], reply["error"]["data"]) == (None, -32000, full)
            assert await closing_of(ws) == 1000
        call = {**OK, "method": "openenv/session/close", "params": {"session_id": session}}
        assert (await request(address, "POST", "/mcp", call)).json() == {
            "jsonrpc": "2.0",
            "id": 7,
            "result": {"session_id": session, "closed": True},
        }
        assert app.sessions.active == 0


async def test_a_constructor_that_raises() -> None:
    async with serving(create_app(Unbuildable, Add, Count)) as address:
        reply = (await request(address, "POST", "/mcp", {**OK, "method": "openenv/session/create"})).json()
        assert reply["error"] == {
            "code": -32000,
            "message": "no such counter",
            "data": {"factory_name": "Unbuildable"},
        }


async def test_the_socket_has_a_session_of_its_own() -> None:
    app = create_app(Counter, Add, Count)
    async with serving(app) as address:
        async with socket_to(address, path="/mcp") as ws:
            reply = await ask(ws, {**OK, "method": "openenv/session/create"})
            session = reply["result"]["session_id"]
            assert app.sessions.active == 1
            reply = await request(address, "GET", "/state", headers={"X-OpenEnv-Session": session})
            assert reply.status_code == 200
            call = {**OK, "method": "openenv/session/close", "params": {"session_id": session}}
            assert (await ask(ws, call))["error"]["code"] == -32600
        await eventually(lambda: app.sessions.active == 0)


async def test_get_is_not_allowed() -> None:
    async with serving(create_app(Counter, Add, Count)) as address:
        assert (await request(address, "GET", "/mcp")).status_code == 405
