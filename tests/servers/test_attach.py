"""/ws?session_id=: sockets that speak for a session which stands by itself, as the released server has it."""

import asyncio
import json
from typing import Any
from uuid import UUID

import pytest
from counter import Add, AsyncCounter, BlockingCounter, Count, Counter, SlowBlocking, SlowConstructor
from serving import ask, closing_of, eventually, opened, request, rpc, serving, socket_to

from openenv_core.tools import ToolResult
from servers import create_app
from servers.app import EnvironmentApp

EVERY_WAY = pytest.mark.parametrize("env", [Counter, BlockingCounter, AsyncCounter], ids=lambda e: e.__name__)
STEP = {"type": "step", "data": {"amount": 2}}


def app_of(env: Any, cap: int = 4, **options: Any) -> EnvironmentApp:
    return create_app(env, Add, Count, max_concurrent_envs=cap, **options)


def frame(method: str, params: Any = None) -> dict[str, Any]:
    call = {"jsonrpc": "2.0", "id": 1, "method": method} | ({} if params is None else {"params": params})
    return {"type": "mcp", "data": call}


@EVERY_WAY
async def test_a_session_outlives_its_sockets(env: type[Counter]) -> None:
    app = app_of(env)
    async with serving(app) as address:
        session = await opened(address)
        assert UUID(session).version == 4
        async with socket_to(address, f"?session_id={session}") as ws:
            await ask(ws, {"type": "reset", "data": {"seed": 3}})
            assert (await ask(ws, STEP))["data"]["observation"]["total"] == 5
        async with socket_to(address, f"?session_id={session}") as ws:
            assert (await ask(ws, STEP))["data"]["observation"]["total"] == 7
            await ws.send('{"type":"close"}')
            assert await closing_of(ws) == 1000
        async with socket_to(address, f"?session_id={session}") as ws:
            assert (await ask(ws, STEP))["data"]["observation"]["total"] == 9
            ws.transport.abort()
        await eventually(lambda: not app.sessions.find("", session).attached)
        assert app.sessions.active == 1
        reply = await rpc(address, "openenv/session/close", {"session_id": session})
        assert reply["result"] == {"session_id": session, "closed": True}
        assert app.sessions.active == 0
        assert not app.sessions._sessions


async def test_an_unknown_session_is_refused() -> None:
    async with serving(app_of(Counter)) as address, socket_to(address, "?session_id=abc") as ws:
        refusal = json.loads(await ws.recv())
        assert refusal == {
            "type": "error",
            "data": {"message": "Unknown session_id: abc", "code": "SESSION_ERROR"},
        }
        assert await closing_of(ws) == 1000


@EVERY_WAY
async def test_one_socket_at_a_time(env: type[Counter]) -> None:
    async with serving(app_of(env)) as address:
        session = await opened(address)
        async with socket_to(address, f"?session_id={session}") as first:
            await ask(first, {"type": "reset"})
            async with socket_to(address, f"?session_id={session}") as second:
                data = json.loads(await second.recv())["data"]
                assert data["message"] == f"Session {session} already has an attached WebSocket"
                assert data["code"] == "SESSION_ERROR"
                assert await closing_of(second) == 1000
            assert (await ask(first, STEP))["data"]["observation"]["total"] == 2


async def test_a_session_that_is_still_initializing() -> None:
    env = SlowConstructor.fresh()
    app = app_of(env)
    async with serving(app) as address:
        opening = asyncio.create_task(request(address, "POST", "/reset", {}, {"X-OpenEnv-Session": "mine"}))
        await eventually(env.entered.is_set)
        async with socket_to(address, "?session_id=mine") as ws:
            data = json.loads(await ws.recv())["data"]
            assert data["message"].startswith("Session mine is still initializing")
        env.release.set()
        assert (await opening).status_code == 200
        async with socket_to(address, "?session_id=mine") as ws:
            assert (await ask(ws, {"type": "state"}))["type"] == "state"


async def test_closing_while_attached_waits_for_the_socket() -> None:
    app = app_of(Counter)
    async with serving(app) as address:
        session = await opened(address)
        async with socket_to(address, f"?session_id={session}") as ws:
            await ask(ws, {"type": "reset"})
            for _ in range(2):
                reply = await rpc(address, "openenv/session/close", {"session_id": session})
                assert reply["result"] == {"session_id": session, "closed": False, "closing": True}
            assert (await ask(ws, STEP))["type"] == "observation"
        await eventually(lambda: app.sessions.active == 0)
        reply = await rpc(address, "openenv/session/close", {"session_id": session})
        assert reply["error"] == {"code": -32602, "message": f"Unknown session_id: {session}", "data": None}


@EVERY_WAY
async def test_create_inside_a_socket_answers_its_own_session(env: type[Counter]) -> None:
    app = app_of(env)
    async with serving(app) as address, socket_to(address) as ws:
        await ask(ws, {"type": "reset", "data": {"seed": 4}})
        reply = await ask(ws, frame("openenv/session/create"))
        session = reply["data"]["result"]["session_id"]
        assert (await ask(ws, frame("openenv/session/create")))["data"]["result"]["session_id"] == session
        assert app.sessions.active == 1
        # Others find it by that id, and take turns with the socket.
        reply = await request(
            address, "POST", "/step", {"action": {"amount": 2}}, {"X-OpenEnv-Session": session}
        )
        assert reply.json()["observation"]["total"] == 6
        assert (await ask(ws, STEP))["data"]["observation"]["total"] == 8
        async with socket_to(address, f"?session_id={session}") as second:
            assert "already has an attached" in json.loads(await second.recv())["data"]["message"]
        own = await ask(ws, frame("openenv/session/close", {"session_id": session}))
        assert own["data"]["error"]["code"] == -32600
        reply = await rpc(address, "openenv/session/close", {"session_id": session})
        assert reply["result"] == {"session_id": session, "closed": False, "closing": True}
        ws.transport.abort()
        await eventually(lambda: app.sessions.active == 0)
        assert (await rpc(address, "tools/list", {"session_id": session}))["error"]["code"] == -32602


async def test_a_step_goes_on_when_its_socket_breaks() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address:
        session = await opened(address)
        async with socket_to(address, f"?session_id={session}") as ws:
            await ws.send(json.dumps(STEP))
            await eventually(env.entered.is_set)
            ws.transport.abort()
        await eventually(lambda: not app.sessions.find("", session).attached)
        async with socket_to(address, f"?session_id={session}") as ws:
            await ws.send('{"type":"state"}')  # waits for its turn
            env.release.set()
            assert json.loads(await ws.recv())["type"] == "state"
        assert (env.stepping, env.closed, app.sessions.active) == (0, 0, 1)


async def test_a_step_on_the_loop_waits_for_the_tool_that_another_caller_calls() -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    class Tooled(Counter):
        def list_tools(self) -> list[Any]:
            return []

        async def call_tool(self, name: str, arguments: Any, context: Any) -> ToolResult:
            entered.set()
            await release.wait()
            return ToolResult.of(self.state.total)

    app = app_of(Tooled)
    async with serving(app) as address:
        session = await opened(address)
        async with socket_to(address, f"?session_id={session}") as ws:
            call = asyncio.create_task(rpc(address, "tools/call", {"name": "total", "session_id": session}))
            await entered.wait()
            await ws.send(json.dumps(STEP))
            await eventually(lambda: app.sessions.find("", session)._waiting == 1)
            release.set()
            assert (await call)["result"]["data"] == 0
            assert json.loads(await ws.recv())["data"]["observation"]["total"] == 2
        # One that leaves while its step waits is seen to leave, and the step is not taken for nobody.
        entered.clear(), release.clear()
        async with socket_to(address, f"?session_id={session}") as ws:
            call = asyncio.create_task(rpc(address, "tools/call", {"name": "total", "session_id": session}))
            await entered.wait()
            await ws.send(json.dumps(STEP))
            await eventually(lambda: app.sessions.find("", session)._waiting == 1)
        await eventually(lambda: not app.sessions.find("", session).attached)
        release.set()
        assert (await call)["result"]["data"] == 2
        async with socket_to(address, f"?session_id={session}") as ws:
            await ws.send(json.dumps({"type": "state"}))
            assert json.loads(await ws.recv())["data"]["total"] == 2
