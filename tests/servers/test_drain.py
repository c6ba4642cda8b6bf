"""A server that is asked to stop lets go of its sessions in order, and returns at its deadline whatever they do."""

import asyncio
import json
from typing import Any

import pytest
from counter import Add, AsyncCounter, BlockingCounter, Count, Counter, SlowBlocking
from serving import ask, closing_of, eventually, opened, request, rpc, serving, socket_to

from servers import create_app
from servers.app import EnvironmentApp

EVERY_WAY = pytest.mark.parametrize("env", [Counter, BlockingCounter, AsyncCounter], ids=lambda e: e.__name__)
STEP = {"type": "step", "data": {"amount": 2}}
LONG_S = 60.0


def app_of(env: Any, cap: int = 8) -> EnvironmentApp:
    return create_app(env, Add, Count, max_concurrent_envs=cap)


@EVERY_WAY
async def test_idle_sockets_are_closed_and_nobody_comes_in(env: type[Counter]) -> None:
    app = app_of(env)
    async with serving(app) as address:
        session = await opened(address)
        await opened(address)
        async with (
            socket_to(address) as ws,
            socket_to(address, f"?session_id={session}") as attached,
            socket_to(address, path="/mcp") as mcp,
        ):
            for connection in (ws, attached):
                assert (await ask(connection, {"type": "reset"}))["type"] == "observation"
            await ask(mcp, {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
            drained = asyncio.create_task(app.drain(LONG_S))
            for connection in (ws, attached, mcp):
                assert await closing_of(connection) == 1001
            await drained
        assert app.sessions.active == 0
        assert not app.sessions._sessions
        async with socket_to(address) as late:
            assert json.loads(await late.recv())["data"]["code"] == "CAPACITY_REACHED"
            assert await closing_of(late) == 1000
        assert (await request(address, "POST", "/reset")).status_code == 503
        assert (await rpc(address, "openenv/session/create"))["error"]["code"] == -32000
    async with serving(app) as address:  # an app may be served again
        assert (await request(address, "POST", "/reset")).status_code == 200


async def test_a_step_that_is_under_way_is_answered() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address:
        await request(address, "POST", "/reset", None, {"X-OpenEnv-Session": "a"})
        step = asyncio.create_task(
            request(address, "POST", "/step", {"action": {"amount": 1}}, {"X-OpenEnv-Session": "a"})
        )
        await eventually(lambda: env.stepping == 1)
        async with socket_to(address) as ws:
            await ws.send(json.dumps(STEP))
            await ws.send(json.dumps(STEP))  # one too many: it came before its turn
            await eventually(lambda: env.stepping == 2)
            drained = asyncio.create_task(app.drain(LONG_S))
            await asyncio.sleep(0.05)
            assert not drained.done()
            env.release.set()
            assert json.loads(await ws.recv())["type"] == "observation"
            assert await closing_of(ws) == 1001
        assert (await step).status_code == 200
        await drained
        assert (env.closed, app.sessions.active) == (2, 0)


async def test_the_deadline_holds() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address, socket_to(address) as ws:
        await request(address, "POST", "/reset", None, {"X-OpenEnv-Session": "a"})
        step = asyncio.create_task(
            request(address, "POST", "/step", {"action": {"amount": 1}}, {"X-OpenEnv-Session": "a"})
        )
        await ws.send(json.dumps(STEP))
        await eventually(lambda: env.stepping == 2)
        await asyncio.wait_for(app.drain(0.2), 20)
        assert (await step).status_code == 404  # its session has been ended
        assert app.sessions.active == 1  # the socket's; it goes with the server
    env.release.set()
    await eventually(lambda: app.sessions.active == 0)
