"""A thousand agents at once, and what an episode takes in memory."""

import asyncio
import gc
import tracemalloc
from collections.abc import Callable

import httpx
import pytest
from gateway_fixtures import Stage, trained, user

Make = Callable[..., Stage]
AGENTS = 1000


@pytest.mark.slow
async def test_a_thousand_agents_are_served_at_once(stage: Make) -> None:
    play = stage(lambda prompt: f"I have read {prompt.rpartition('number ')[2].partition('<')[0]}")
    waiting: list[int] = [0, 0]

    async def think() -> None:
        waiting[0] += 1
        waiting[1] = max(waiting)
        await asyncio.sleep(1.0)
        waiting[0] -= 1

    play.generator.before = think
    url, episodes = await play.serve(), [play.open() for _ in range(AGENTS)]

    async def ask(http: httpx.AsyncClient, number: int) -> str:
        headers = {"authorization": f"Bearer {episodes[number].key}"}
        body = {"messages": [user(f"number {number}")], "stream": number % 2 == 1}
        reply = (await http.post("/v1/chat/completions", json=body, headers=headers)).raise_for_status()
        return reply.text

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=240) as http:
        replies = await asyncio.gather(*(ask(http, number) for number in range(AGENTS)))
    assert all(f'"I have read {number}"' in reply for number, reply in enumerate(replies))
    assert [len(trained(episode)) for episode in episodes] == [1] * AGENTS
    assert waiting[1] > AGENTS // 2


@pytest.mark.slow
async def test_an_episode_keeps_few_bytes_a_token(stage: Make) -> None:
    answer = "call an arguments name " * 90
    play = stage(lambda prompt: answer, max_length=100_000)
    await play.serve()
    await play.chat(play.open(), [user("a")])  # caches of the libraries

    async def memory(turns: int, episodes: int) -> tuple[int, int]:
        """The bytes that episodes keep, and their tokens."""
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        opened = [play.open() for _ in range(episodes)]
        for episode in opened:
            chat = [user("b")]
            for _ in range(turns):
                chat += [await play.chat(episode, chat), user("c" * 500)]
        play.generator.sampled.clear()
        play.generator.asked.clear()
        del chat
        gc.collect()
        tokens = sum(len(node.added) + len(node.tokens) for one in opened for node in one.tree.nodes)
        return tracemalloc.get_traced_memory()[0] - before, tokens

    tracemalloc.start()
    try:
        empty, _ = await memory(0, 50)
        full, tokens = await memory(20, 10)
    finally:
        tracemalloc.stop()
    assert empty / 50 < 16_000
    assert tokens > 100_000
    assert full / tokens < 16
