"""Many more clients than slots: all finish in order of arrival, over one worker and over two."""

import asyncio
import sys

import pytest
from counter import Add
from counter_client import CounterEnv
from serve_process import serve
from serving import WAIT_TIMEOUT_S, request

pytestmark = pytest.mark.slow

CROWDS = pytest.mark.parametrize(
    ("clients", "slots"),
    [(100, 20), pytest.param(2000, 500, marks=pytest.mark.soak)],
)
WORKERS = pytest.mark.parametrize("workers", ["1", "2"])


async def capacity(address: str) -> dict[str, int]:
    usage: dict[str, int] = (await request(address, "GET", "/capacity")).json()
    return usage


def client_of(address: str) -> CounterEnv:
    return CounterEnv(f"http://{address}", connect_timeout_s=120, message_timeout_s=120)


@WORKERS
@CROWDS
async def test_all_clients_of_a_crowd_finish_without_retry_code(
    clients: int, slots: int, workers: str
) -> None:
    with serve("--max-sessions", str(slots), "--workers", workers) as server:
        playing, most = 0, 0

        async def play() -> int:
            nonlocal playing, most
            async with client_of(server.address) as env:
                await env.reset(seed=1)
                playing += 1
                most = max(most, playing)
                await asyncio.sleep(0.2)
                total = (await env.step(Add(amount=1))).observation.total
                playing -= 1
            return total

        crowd = asyncio.gather(*(play() for _ in range(clients)))
        usage = {"waiting": 0}
        while not usage["waiting"]:
            usage = await capacity(server.address)
            assert usage["in_use"] <= usage["slots"] == slots
        assert await crowd == [2] * clients
        assert most <= slots
        while usage["in_use"]:
            usage = await capacity(server.address)
        assert (usage["waiting"], usage["estimate_s"]) == (0, 0)


@WORKERS
@CROWDS
async def test_crowd_plays_in_order_of_arrival(clients: int, slots: int, workers: str) -> None:
    """Each connects once the server has seen the one before, so the order of arrival is known."""
    with serve("--max-sessions", str(slots), "--workers", workers) as server:
        all_are_there = asyncio.Event()
        order: list[int] = []

        async def play(number: int) -> None:
            async with client_of(server.address) as env:
                await env.reset(seed=1)
                order.append(number)
                await all_are_there.wait()
                await asyncio.sleep(0.05)

        crowd = []
        for number in range(clients):
            crowd.append(asyncio.create_task(play(number)))
            expected = (min(number + 1, slots), max(0, number + 1 - slots))
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                while (usage := await capacity(server.address)) and (
                    usage["in_use"],
                    usage["waiting"],
                ) != expected:
                    assert usage["in_use"] + usage["waiting"] <= number + 1
        all_are_there.set()
        await asyncio.gather(*crowd)
        # Fair: who came as the n-th plays as one of the first 2 n, and not before half of those that came before.
        ratios = [(place + slots) / (number + slots) for place, number in enumerate(order)]
        sys.stdout.write(f"place by arrival: {min(ratios):.2f} to {max(ratios):.2f}\n")
        assert all(0.5 <= ratio <= 2 for ratio in ratios)
