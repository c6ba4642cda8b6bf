"""Many more clients than slots, which all come at once: all finish, over one worker and over several."""

import asyncio
import sys

import pytest
from counter import Add
from counter_client import CounterEnv
from serve_process import serve
from serving import request


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("clients", "slots"),
    [pytest.param(100, 20, marks=pytest.mark.slow), pytest.param(2000, 500, marks=pytest.mark.soak)],
)
async def test_all_of_a_crowd_finish_without_code_of_theirs(clients: int, slots: int, workers: str) -> None:
    with serve("--max-sessions", str(slots), "--workers", workers) as server:
        playing, most = 0, 0
        arrivals: list[int] = []
        order: list[int] = []

        async def play(number: int) -> int:
            nonlocal playing, most
            async with CounterEnv(
                f"http://{server.address}", connect_timeout_s=120, message_timeout_s=120
            ) as env:
                arrivals.append(number)  # it has asked for a session
                await env.reset(seed=1)
                order.append(number)
                playing += 1
                most = max(most, playing)
                await asyncio.sleep(0.2)
                total = (await env.step(Add(amount=1))).observation.total
                playing -= 1
            return total

        crowd = asyncio.gather(*map(play, range(clients)))
        told = {"waiting": 0}
        while not told["waiting"]:
            told = (await request(server.address, "GET", "/capacity")).json()
            assert told["in_use"] <= told["slots"] == slots
        assert await crowd == [2] * clients
        assert most <= slots
        # Fair: who came as the n-th plays as one of the first 2 n, and not before half of those that came before.
        ratios = [(order.index(one) + slots) / (place + slots) for place, one in enumerate(arrivals)]
        sys.stdout.write(f"place by arrival: {min(ratios):.2f} to {max(ratios):.2f}\n")
        assert all(0.5 <= ratio <= 2 for ratio in ratios)
        while told["in_use"]:
            told = (await request(server.address, "GET", "/capacity")).json()
        assert (told["waiting"], told["estimate_s"]) == (0, 0)
