"""Requests that come again, clients that leave, engines that fail: no answer is trained twice, none is lost."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from gateway_fixtures import Stage, trained, user

from rl_bridge.errors import GeneratorError
from rl_bridge.gateway.sampled import SampledEpisode

Make = Callable[..., Stage]
ASK = {"model": "m", "messages": [user("a")]}
CHAT = "/v1/chat/completions"


def answers(play: Stage, *numbers: int) -> list[list[int]]:
    return [list(play.generator.sampled[number].tokens) for number in numbers]


def learned(episode: SampledEpisode) -> list[list[int]]:
    return [tokens for tokens, _ in trained(episode)]


async def said(play: Stage, episode: SampledEpisode, **headers: str) -> Any:
    return (await play.post(episode, CHAT, ASK, **headers)).json()


async def test_retry_that_its_client_marks_gets_the_first_answer(stage: Make) -> None:
    play = stage(["one", "two"])
    await play.serve()
    episode = play.open()
    first = await said(play, episode)
    assert await said(play, episode, **{"x-stainless-retry-count": "1"}) == first
    assert learned(episode) == answers(play, 0)


async def test_idempotency_key_names_a_request(stage: Make) -> None:
    play = stage(["one", "two"])
    await play.serve()
    episode = play.open()
    first, again, other = [await said(play, episode, **{"idempotency-key": key}) for key in "AAB"]
    assert first == again != other
    mixed = await play.post(episode, CHAT, {"messages": [user("b")]}, **{"idempotency-key": "A"})
    assert (mixed.status_code, play.generator.sampled[2:]) == (400, [])


async def test_equal_request_is_sampled_anew_and_the_answer_that_nobody_went_on_from_is_left_out(
    stage: Make,
) -> None:
    play = stage(["one", "two", "three"])
    await play.serve()
    episode = play.open()
    first, second = await said(play, episode), await said(play, episode)
    assert first != second
    assert learned(episode) == answers(play, 1)
    # Unless the agent does go on from it.
    await play.chat(episode, [user("a"), first["choices"][0]["message"], user("b")])
    assert learned(episode) == answers(play, 0, 1, 2)


async def test_of_equal_requests_at_once_the_last_alone_has_an_agent_for_sure(stage: Make) -> None:
    play = stage(["one", "two", "three"])
    await play.serve()
    episode = play.open()
    play.generator.before = lambda: asyncio.sleep(0.05)
    first, _ = await asyncio.gather(said(play, episode), said(play, episode))
    assert learned(episode) == answers(play, 1)
    await play.chat(episode, [user("a"), first["choices"][0]["message"], user("b")])
    assert learned(episode) == answers(play, 0, 1, 2)


async def test_answers_in_the_same_words_are_left_out_if_a_chat_may_continue_either(stage: Make) -> None:
    play = stage(["call an arguments name"] * 2 + ["go"])
    await play.serve()
    episode = play.open()
    play.generator.before = lambda: asyncio.sleep(0.05)
    (first, _) = await asyncio.gather(said(play, episode), said(play, episode))
    one, two = answers(play, 0, 1)
    assert one != two  # in other tokens
    await play.chat(episode, [user("a"), first["choices"][0]["message"], user("b")])
    assert learned(episode) == answers(play, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_aborts_its_answer(stage: Make, stream: bool) -> None:
    play = stage(["two"], keep_alive_s=0.05)
    await play.serve()
    episode = play.open()
    started = asyncio.Event()

    async def hang() -> None:
        started.set()
        await asyncio.sleep(3600)

    play.generator.before = hang
    call = asyncio.create_task(play.post(episode, CHAT, {**ASK, "stream": stream}))
    await started.wait()
    await asyncio.sleep(0.1 if stream else 0.0)  # its stream has begun
    call.cancel()
    async with asyncio.timeout(30):
        while not play.generator.aborted:  # noqa: ASYNC110 - it is the server's
            await asyncio.sleep(0.01)
    play.generator.before = lambda: None
    await said(play, episode, **{"x-stainless-retry-count": "1"})
    assert learned(episode) == answers(play, 0)
    assert (episode.calls, next(node.ended for node in episode.tree.nodes)) == (2, False)


async def test_retry_of_an_aborted_request_gets_the_answer_to_an_equal_one_which_is_then_learned(
    stage: Make,
) -> None:
    play = stage(["one"])
    await play.serve()
    episode = play.open()
    first = await said(play, episode)
    started = asyncio.Event()

    async def hang() -> None:
        started.set()
        await asyncio.sleep(3600)

    play.generator.before = hang
    call = asyncio.create_task(said(play, episode))
    await started.wait()
    call.cancel()
    async with asyncio.timeout(30):
        while not play.generator.aborted:  # noqa: ASYNC110 - it is the server's
            await asyncio.sleep(0.01)
    assert learned(episode) == []  # the agent may have come again since it never got the first answer
    assert await said(play, episode, **{"x-stainless-retry-count": "1"}) == first
    assert learned(episode) == answers(play, 0)


async def test_retry_joins_the_answer_that_is_being_sampled(stage: Make) -> None:
    play = stage(["one"])
    await play.serve()
    episode = play.open()
    go = asyncio.Event()
    play.generator.before = go.wait
    first = asyncio.create_task(said(play, episode))
    while not play.generator.asked:  # noqa: ASYNC110 - it is the server's
        await asyncio.sleep(0.01)
    second = asyncio.create_task(said(play, episode, **{"x-stainless-retry-count": "1"}))
    while next(iter(episode._by_digest.values()))[0].waiters < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    first.cancel()
    go.set()
    assert (await second)["choices"][0]["message"]["content"] == "one"
    assert learned(episode) == answers(play, 0)


async def test_engine_that_fails_is_an_error_to_retry_and_no_answer(stage: Make) -> None:
    play = stage(["one"])
    await play.serve()
    episode = play.open()

    def fail() -> None:
        raise GeneratorError("the engine is gone")

    play.generator.before = fail
    response = await play.post(episode, CHAT, ASK)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert isinstance(episode.failure, GeneratorError)
    play.generator.before = lambda: None
    await said(play, episode, **{"x-stainless-retry-count": "1"})
    assert (learned(episode), episode.failure) == (answers(play, 0), None)


async def test_end_of_the_episode_ends_its_answers(stage: Make) -> None:
    play = stage([])
    await play.serve()
    episode = play.open()
    play.generator.before = lambda: asyncio.sleep(3600)
    call = asyncio.create_task(play.post(episode, CHAT, ASK))
    while not play.generator.asked:  # noqa: ASYNC110 - it is the server's
        await asyncio.sleep(0.01)
    await play.gateway.close(episode)
    assert (await call).status_code == 403
    assert learned(episode) == []
