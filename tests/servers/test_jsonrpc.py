"""JSON-RPC, the same on POST /mcp, on the socket /mcp and in the mcp frames of /ws."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest
from counter import Counter
from server_apps import HEADER, app_of, mcp
from serving import ask, eventually, open_session, request, rpc, serving, socket_to, wait_close_code

Ask: TypeAlias = Callable[[Any], Awaitable[Any]]

OK = mcp("tools/list")
TRANSPORTS = ["POST", "socket", "frames"]


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


ERRORS: list[tuple[dict[str, Any], Any, int]] = [
    ({**OK, "jsonrpc": "1.0"}, None, -32600),
    ({"id": 7, "method": "tools/list"}, None, -32600),
    ({**OK, "method": 5}, None, -32600),
    ({**OK, "more": 1}, None, -32600),
    ({**OK, "id": 1.5}, None, -32600),
    ({**OK, "id": [1]}, None, -32600),
    ({**OK, "id": True}, None, -32600),
    ({**OK, "params": [1]}, None, -32600),
    ({**OK, "params": None}, None, -32600),
    (mcp("no/such"), 7, -32601),
    (mcp("tools/call"), 7, -32602),
    (mcp("openenv/session/close"), 7, -32602),
    (mcp("openenv/session/close", session_id="abc"), 7, -32602),
    (mcp("openenv/session/close", session_id=[1]), 7, -32602),
    (OK, 7, -32603),
    ({**OK, "id": "seven"}, "seven", -32603),
    ({**OK, "id": None}, None, -32603),
    ({"jsonrpc": "2.0", "method": "tools/list"}, None, -32603),
    (mcp("tools/call", name="t", arguments={}), 7, -32603),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_errors_keep_the_connection_open(transport: str) -> None:
    async with serving(app_of(Counter)) as address, over(transport, address) as send:
        for value, request_id, code in ERRORS:
            reply = await send(value)
            assert set(reply) == {"jsonrpc", "id", "error"}
            assert (reply["jsonrpc"], reply["id"], reply["error"]["code"]) == ("2.0", request_id, code), value
            assert reply["error"]["message"]
            assert reply["error"]["data"] is None


async def test_text_that_is_not_one_request_is_refused() -> None:
    texts = ["{", "", "[]", f"[{json.dumps(OK)}]", "5", "null", '{"jsonrpc":NaN}', "[" * 100_000, "\ud800"]
    async with serving(app_of(Counter)) as address, socket_to(address, path="/mcp") as ws:
        for text in texts:
            raw = text.encode("utf-8", "surrogatepass")
            reply = (await request(address, "POST", "/mcp", raw)).json()
            assert (reply["id"], reply["error"]["code"], reply["error"]["data"]) == (None, -32700, None), text
            for frame in (raw, *([text] if text.isascii() else [])):
                assert (await ask(ws, frame))["error"]["code"] == -32700, text
            assert (await ask(ws, OK))["id"] == 7
        assert (await request(address, "GET", "/mcp")).status_code == 405


async def test_full_server_answers_with_its_capacity() -> None:
    app = app_of(Counter, cap=1)
    async with serving(app) as address:
        session = await open_session(address)
        full = {"active_sessions": 1, "max_sessions": 1}
        reply = await rpc(address, "openenv/session/create")
        assert (reply["error"]["code"], reply["error"]["data"]) == (-32000, full)
        async with socket_to(address, path="/mcp") as ws:
            reply = json.loads(await ws.recv())
            assert (reply["id"], reply["error"]["code"], reply["error"]["data"]) == (None, -32000, full)
            assert await wait_close_code(ws) == 1000
        closed = await rpc(address, "openenv/session/close", {"session_id": session})
        assert closed == {"jsonrpc": "2.0", "id": 1, "result": {"session_id": session, "closed": True}}
        assert app.sessions.active == 0


async def test_session_create_waits_as_long_as_prefer_says() -> None:
    app = app_of(Counter, cap=1, max_wait_s=600.0)
    async with serving(app) as address:
        session = await open_session(address)
        reply = await rpc(address, "openenv/session/create", prefer="wait=0")
        assert reply["error"]["data"]["active_sessions"] == 1
        creating = asyncio.create_task(rpc(address, "openenv/session/create", prefer="wait=20"))
        await eventually(lambda: app.sessions.queue.capacity()["waiting"] == 1)
        (ticket,) = app.sessions.queue._tickets[""]
        assert ticket.timer is not None
        assert ticket.timer.when() - asyncio.get_running_loop().time() > 10
        await rpc(address, "openenv/session/close", {"session_id": session})
        assert (await creating)["result"]["session_id"] != session


async def test_socket_has_its_own_session() -> None:
    app = app_of(Counter, cap=1)
    async with serving(app) as address:
        async with socket_to(address, path="/mcp") as ws:
            session = (await ask(ws, mcp("openenv/session/create")))["result"]["session_id"]
            assert app.sessions.active == 1
            assert (await request(address, "GET", "/state", headers={HEADER: session})).status_code == 200
            closing = await ask(ws, mcp("openenv/session/close", session_id=session))
            assert closing["error"]["code"] == -32600
        await eventually(lambda: app.sessions.active == 0)
