"""A second client of `ropewalk.v1`, in JavaScript (drivers/ropewalk_client.mjs), over connections that break."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from counter import Add, Count, Counter, SlowBlocking
from faulty_proxy import FaultyProxy, faulty_proxy
from node_tools import node
from released import DRIVERS
from serving import eventually, serving
from v1_frames import validated_frames  # noqa: F401 - a fixture

from servers import create_app
from servers.app import EnvironmentApp

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("validated_frames"), pytest.mark.timeout(600)]

SEND_DELAY_S = 0.6
WAIT_TIMEOUT_S = 0.3


class Tally(Counter):
    """Counts without a limit and returns the number of steps."""

    def step(self, action: Add) -> Count:
        self._state.total += action.amount
        self._state.step_count += 1
        return Count(total=self._state.total, extra=self._state.step_count, reward=1)


class Node:
    """The client in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def send(self, **header: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(header).encode() + b"\n")

    async def recv(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(await asyncio.wait_for(self.process.stdout.readline(), 60))

    async def ask(self, **header: Any) -> Any:
        self.send(**header)
        return await self.recv()

    async def step(self, amount: int, **header: Any) -> Any:
        return (await self.ask(type="step", data={"amount": amount}, **header))["data"]["observation"]


@asynccontextmanager
async def connected_client(
    env: type[Counter] = Tally, cap: int = 8, **options: Any
) -> AsyncIterator[tuple[EnvironmentApp, FaultyProxy, Node]]:
    """Yield a server, a proxy in front of it, and a client with an open session."""
    app = create_app(env, Add, Count, max_concurrent_envs=cap)
    async with serving(app) as address, faulty_proxy(address) as proxy:
        process = await asyncio.create_subprocess_exec(
            node(),
            str(DRIVERS / "ropewalk_client.mjs"),
            f"ws://127.0.0.1:{proxy.port}/ws",
            json.dumps(options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        client = Node(process)
        try:
            client.send(op="open", lease_s=30)
            client.send(type="reset", data={"seed": 0})
            assert (await client.recv())["members"] == [0]
            assert (await client.recv())["type"] == "observation"
            yield app, proxy, client
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


@pytest.mark.parametrize("how", ["cut", "half_close", "hold", "delay"])
async def test_session_outlives_its_connection(how: str) -> None:
    silent = how in ("hold", "delay")  # a client without pings finds out by its own patience
    async with connected_client(**({"patienceS": WAIT_TIMEOUT_S} if silent else {})) as (app, proxy, client):
        for number in range(1, 3):
            connections = proxy.connections
            if how == "delay":
                proxy.delay_s = SEND_DELAY_S
            else:
                getattr(proxy, how)()
            client.send(type="step", data={"amount": 2})
            if how == "delay":
                await eventually(lambda before=connections: proxy.connections > before)
                proxy.delay_s = 0.0
            observation = (await client.recv())["data"]["observation"]
            assert (observation["total"], observation["extra"]) == (2 * number, number)
            assert proxy.connections > connections
        assert app.sessions.active == 1
        client.send(close=True)
        await eventually(lambda: app.sessions.active == 0)


@pytest.mark.parametrize("breaks", [15, pytest.param(1000, marks=pytest.mark.soak)])
async def test_no_step_is_lost_or_repeated_wherever_a_connection_breaks(breaks: int) -> None:
    rng = random.Random(breaks)

    def limits() -> tuple[int | None, int | None]:
        if proxy.connections >= breaks:
            return None, None
        return (rng.randrange(250, 900), None) if rng.random() < 0.5 else (None, rng.randrange(150, 600))

    async with connected_client() as (_, proxy, client):
        proxy.cut_after = limits
        proxy.cut()
        number = 0
        while proxy.connections < breaks:
            # Several are under way, so that some were taken and some were not.
            for _ in range(3):
                number += 1
                client.send(type="step", data={"amount": 2 * number})
            for back in (2, 1, 0):
                observation = (await client.recv())["data"]["observation"]
                taken = number - back
                assert (observation["extra"], observation["total"]) == (taken, taken * (taken + 1))


async def test_executed_step_is_answered_after_a_break_and_not_repeated() -> None:
    env = SlowBlocking.fresh()
    async with connected_client(env) as (_, proxy, client):
        client.send(type="step", data={"amount": 1})
        await asyncio.to_thread(env.entered.wait, 20)
        late = await client.ask(type="step", data={"amount": 1}, deadline_s=0.01)
        assert (late["id"], late["data"]["code"]) == (4, "NOT_EXECUTED")
        client.send(type="step", data={"amount": 1})
        replies = [await client.ask(op="cancel", request=5), await client.recv()]
        assert sorted(one["id"] for one in replies) == [5, 6]
        assert next(one for one in replies if one["id"] == 5)["data"]["code"] == "NOT_EXECUTED"
        proxy.cut()
        env.release.set()
        assert ((await client.recv())["id"], env.stepping) == (3, 0)
        assert (await client.ask(type="state"))["id"] == 7


async def test_batches_forks_and_snapshots_work() -> None:
    async with connected_client() as (app, proxy, client):
        assert await client.step(5)
        assert (await client.ask(op="fork", member=0, count=2))["members"] == [1, 2]
        proxy.cut()
        snapshot = (await client.ask(op="snapshot", member=0))["snapshot"]
        amounts = {"dtype": "int64", "shape": [3], "data": [1, 2, 3]}
        reply = await client.ask(op="step", actions={"amount": 0}, arrays=[amounts])
        assert [row["total"] for row in reply["rows"]] == [6, 7, 8]
        assert reply["arrays"][reply["reward"]]["data"] == [1, 1, 1]
        assert reply["arrays"][reply["truncated"]] == {"dtype": "bool", "shape": [3], "data": [0, 0, 0]}
        assert (await client.ask(op="close", members=[1]))["last"]
        assert (await client.ask(op="open", snapshot=snapshot))["members"] == [3]
        assert (await client.step(1, member=3))["total"] == 6
        assert (await client.ask(op="state"))["members"] == [0, 2, 3]
        assert app.sessions.active == 3


async def test_failed_resume_is_reported() -> None:
    async with connected_client() as (app, proxy, client):
        (link,) = app.links.registered.values()
        await link.close()
        proxy.cut()
        assert "open a new one" in (await client.ask(type="state"))["failed"]
