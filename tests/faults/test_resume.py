"""Connections that break: sessions go on over another, and no step is lost or taken twice."""

import asyncio
import random

import pytest
from counter import Add, Count, Counter, SlowBlocking
from counter_client import CounterEnv
from faulty_proxy import FaultyProxy, faulty_proxy
from serving import eventually, serving

from servers import create_app
from servers.app import EnvironmentApp


class Tally(Counter):
    """Counts without an end; what it says tells how often it was asked."""

    def step(self, action: Add) -> Count:
        self._state.total += action.amount
        self._state.step_count += 1
        return Count(total=self._state.total, extra=self._state.step_count, reward=1)


class BlockingTally(Tally):
    BLOCKING = True


def app_of(env: type[Counter], cap: int = 4) -> EnvironmentApp:
    return create_app(env, Add, Count, max_concurrent_envs=cap)


@pytest.mark.parametrize("env", [Tally, BlockingTally])
@pytest.mark.parametrize("how", ["cut", "half_close"])
async def test_a_session_outlives_its_connection(env: type[Counter], how: str) -> None:
    app = app_of(env)
    async with serving(app) as address, faulty_proxy(address) as proxy:
        async with CounterEnv(proxy.url) as client:
            await client.reset(seed=5)
            for number in range(1, 4):
                getattr(proxy, how)()
                seen = (await client.step(Add(amount=1))).observation
                assert (seen.total, seen.extra) == (5 + number, number)
            assert proxy.connections > 1
            assert app.sessions.active == 1
        await eventually(lambda: app.sessions.active == 0)  # a close in order ends the lease too


async def test_a_step_that_was_executed_is_answered_and_not_executed_again() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with (
        serving(app) as address,
        faulty_proxy(address) as proxy,
        CounterEnv(proxy.url) as client,
    ):
        await client.reset()
        step = asyncio.create_task(client.step(Add(amount=1)))
        await asyncio.to_thread(env.entered.wait, 20)
        proxy.cut()
        env.release.set()
        await step
        assert env.stepping == 0
        assert proxy.connections == 2


async def play(proxy: FaultyProxy, rng: random.Random, breaks: int) -> None:
    """Play an episode while connections break at any byte of either way."""

    def limits() -> tuple[int | None, int | None]:
        if proxy.connections >= breaks:
            return None, None
        # A handshake has about 250 bytes each way, a resume 150, a step 70.
        return (rng.randrange(200, 900), None) if rng.random() < 0.5 else (None, rng.randrange(150, 600))

    async with CounterEnv(proxy.url) as client:
        await client.reset(seed=0)
        proxy.cut_after = limits
        proxy.cut()
        number = 0
        while proxy.connections < breaks:
            number += 1
            seen = (await client.step(Add(amount=2 * number))).observation
            assert (seen.extra, seen.total) == (number, number * (number + 1))


@pytest.mark.parametrize(
    "breaks", [15, pytest.param(1000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("env", [Tally, BlockingTally])
async def test_no_step_is_lost_and_none_is_taken_twice_wherever_a_connection_breaks(
    env: type[Counter], breaks: int
) -> None:
    app = app_of(env, cap=64)
    async with serving(app) as address, faulty_proxy(address) as proxy:
        await play(proxy, random.Random(breaks), breaks)
        await eventually(lambda: app.sessions.active == 0)
