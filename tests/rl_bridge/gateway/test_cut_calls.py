"""Calls whose connections are cut at random points, under the retries of each SDK: nothing lost, nothing twice."""

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from faulty_proxy import faulty_proxy
from gateway_fixtures import Stage, trained, user
from missing import require

pytestmark = pytest.mark.slow

openai = require("openai")
anthropic = require("anthropic")

Make = Callable[..., Stage]
AGENTS, TURNS = 17, 10


def draw_cut(source: random.Random) -> tuple[int | None, int | None]:
    """After how many bytes of requests or replies a connection is cut; it carries two calls or so."""
    limit = int(source.uniform(50, 4000))
    return (limit, None) if source.random() < 0.3 else (None, limit)


async def ask_chat(client: Any, chat: list[Any], stream: bool) -> str:
    if not stream:
        done = await client.chat.completions.create(model="m", messages=chat)
        return str(done.choices[0].message.content)
    text, finish = "", None
    async for chunk in await client.chat.completions.create(model="m", messages=chat, stream=True):
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason
    if finish is None:
        raise ConnectionError("the stream ended too early")
    return text


async def ask_responses(client: Any, chat: list[Any], stream: bool) -> str:
    if not stream:
        return str((await client.responses.create(model="m", input=chat)).output_text)
    async with client.responses.stream(model="m", input=chat) as events:
        return str((await events.get_final_response()).output_text)


async def ask_messages(client: Any, chat: list[Any], stream: bool) -> str:
    options = {"model": "m", "max_tokens": 100, "messages": chat}
    if not stream:
        return str((await client.messages.create(**options)).content[0].text)
    async with client.messages.stream(**options) as events:
        message = await events.get_final_message()
    if message.stop_reason is None:
        raise ConnectionError("the stream ended too early")
    return str(message.content[0].text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
async def test_no_answer_is_lost_or_trained_twice(stage: Make, ask: Any, stream: bool) -> None:
    numbers = itertools.count()
    play = stage(lambda prompt: f"answer {next(numbers)}", keep_alive_s=0.01)
    source = random.Random(f"{ask.__name__}{stream}")
    play.generator.before = lambda: asyncio.sleep(source.choice([0.0, 0.0, 0.03]))
    url = await play.serve()
    episodes = [play.open() for _ in range(AGENTS)]
    taken: list[list[str]] = [[] for _ in episodes]

    async def converse(index: int, proxy: str) -> None:
        key, kind = episodes[index].key, anthropic if ask is ask_messages else openai
        base = proxy if ask is ask_messages else f"{proxy}/v1"
        make = kind.AsyncAnthropic if ask is ask_messages else kind.AsyncOpenAI
        chat: list[Any] = [user("begin")]
        async with make(base_url=base, api_key=key, max_retries=3) as client:
            while len(taken[index]) < TURNS:
                # What an SDK gives up, and a stream that broke off, the agent asks once more, and does not say so.
                try:
                    answer = await ask(client, chat, stream)
                except Exception:
                    continue
                taken[index].append(answer)
                chat += [{"role": "assistant", "content": answer}, user(f"go on {len(taken[index])}")]

    async with faulty_proxy(url.removeprefix("http://")) as proxy:
        proxy.cut_after = lambda: draw_cut(source)
        await asyncio.gather(*(converse(index, proxy.url) for index in range(AGENTS)))
        assert proxy.connections > AGENTS * TURNS // 4
    sampled = {tuple(one.tokens) for one in play.generator.sampled}
    for episode, answers in zip(episodes, taken, strict=True):
        learned = trained(episode)
        texts = [play.tokenizer.text(tokens) for tokens, _ in learned]
        assert texts == answers  # each that the agent took, once, and no other
        assert {tuple(tokens) for tokens, _ in learned} <= sampled
