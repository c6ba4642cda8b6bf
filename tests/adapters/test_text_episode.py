import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from counter import Add, Count, Counter, Diverging, Failing, SlowAsync, Unscored
from serving import reconfigured, serving

from envs.blackjack_env.server.app import app as blackjack
from envs.shop_env.server.app import app as shop
from openenv_core import Action
from openenv_core.adapters.episode import TextEpisode, fetch_schema, read_call
from openenv_core.errors import AuthenticationError, ConnectionFailedError, ProtocolError
from servers import create_app


@asynccontextmanager
async def playing(app: Any, **options: Any) -> AsyncIterator[TextEpisode]:
    async with serving(app) as address:
        episode = TextEpisode(f"http://{address}", **options)
        yield episode
        await episode.close()


async def test_a_game_is_played_by_one_tool_with_the_fields_of_its_action() -> None:
    async with playing(blackjack, unfinished_reward=-1) as episode:
        table = await episode.reset(seed=1)
        assert table.startswith("You hold ")
        assert [tool["function"]["name"] for tool in episode.tools] == ["act"]
        assert episode.reward == -1
        wrong = await episode.call("act", {"action": "double"})
        assert wrong.startswith("error: ")
        assert "no tool 'hit'" in await episode.call("hit", {"action": "stand"})
        assert not episode.done
        end = await episode.call("act", {"action": "stand"})
        assert episode.done
        assert episode.reward in (-1, 0, 1)
        assert "The dealer holds" in end
        assert await episode.call("act", {"action": "stand"}) == "error: the episode is over"
        assert await episode.reset(seed=1) == table


async def test_game_with_a_union_of_actions_offers_each() -> None:
    class Subtract(Action):
        less: int

    async with playing(create_app(Counter, Add | Subtract, Count)) as episode:
        await episode.open()
        (tool,) = episode.tools
        parameters = tool["function"]["parameters"]
        names = [option["$ref"].rpartition("/")[2] for option in parameters["anyOf"]]
        assert [list(parameters["$defs"][name]["required"]) for name in names] == [["amount"], ["less"]]


async def test_tools_are_the_environments_own_and_what_a_tool_says_reaches_the_policy() -> None:
    async with playing(shop) as episode:
        await episode.reset(seed=3)
        names = {tool["function"]["name"] for tool in episode.tools}
        assert "act" not in names
        assert len(names) > 3
        assert (await episode.call("no_such_tool", {})).startswith("error: ")
        assert episode.failure is None
        assert all(name in episode.instructions for name in names)


@pytest.mark.parametrize("environment", [Failing, Unscored])
async def test_unscored_episode_has_no_reward(environment: type[Counter]) -> None:
    async with playing(create_app(environment, Add, Count), unfinished_reward=-1) as episode:
        await episode.reset()
        await episode.call("act", {"amount": 1})
        assert episode.done
        assert episode.reward is None


async def test_reward_that_is_not_finite_leaves_the_whole_episode_unscored() -> None:
    async with playing(create_app(Diverging, Add, Count), unfinished_reward=-1) as episode:
        await episode.reset()
        for amount in (1, 0, 1):
            assert not episode.done
            await episode.call("act", {"amount": amount})
        assert (episode.reward, episode.unscored) == (None, "the reward is nan")
        await episode.reset()
        await episode.call("act", {"amount": 10})
        assert (episode.reward, episode.unscored) == (1.0, None)


async def test_step_that_hangs_does_not_hold_up_the_next_episode() -> None:
    app = create_app(SlowAsync.fresh(), Add, Count, max_concurrent_envs=2)
    async with playing(app, step_timeout_s=0.3, reset_timeout_s=30.0) as episode:
        await episode.reset()
        assert "has failed" in await episode.call("act", {"amount": 1})
        await episode.reset()
        assert episode.failure is None


async def test_first_reset_waits_for_a_server_that_is_away() -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        episode = TextEpisode(f"http://127.0.0.1:{place.getsockname()[1]}")
        resetting = asyncio.create_task(episode.reset(seed=1))
        await asyncio.wait([resetting], timeout=0.2)
        async with serving(blackjack, place):
            assert (await resetting).startswith("You hold ")
            await episode.close()


async def test_first_reset_waits_for_a_server_behind_a_proxy() -> None:
    refusals = iter((502, 503, 429))

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        status = next(refusals, None) if scope["type"] == "http" else None
        if status is None:
            await blackjack(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body"})

    async with serving(proxy) as address:  # type: ignore[arg-type]
        episode = TextEpisode(f"http://{address}")
        assert (await episode.reset(seed=1)).startswith("You hold ")
        await episode.close()
    assert next(refusals, None) is None


@pytest.mark.slow
async def test_lost_server_gives_no_reward_and_fails_the_next_reset() -> None:
    async with serving(blackjack) as address:
        episode = TextEpisode(f"http://{address}", reset_timeout_s=2.0)
        await episode.reset(seed=1)
    reply = await episode.call("act", {"action": "hit"})
    assert reply.startswith("error: the environment has failed")
    assert episode.reward is None
    with pytest.raises(ConnectionFailedError):
        await episode.reset(seed=2)
    await episode.close()


async def test_refused_token_is_reported_at_once() -> None:
    app = reconfigured(create_app(Counter, Add, Count), tokens=("correct-horse-battery-staple",))
    async with serving(app) as address:
        with pytest.raises(AuthenticationError, match=r"HTTP 401.*ROPEWALK_TOKEN"):
            await fetch_schema(f"http://{address}", token="wrong")
        episode = TextEpisode(f"http://{address}", token="wrong", reset_timeout_s=1e6)
        with pytest.raises(AuthenticationError, match="HTTP 401"):
            await episode.reset(seed=1)
        await episode.close()


async def test_errors_show_no_password() -> None:
    async with serving(blackjack) as address:
        for url, error in (
            ("http://me:hush@127.0.0.1:9", ConnectionFailedError),
            (f"http://me:hush@{address}/no", ProtocolError),
        ):
            with pytest.raises(error, match=r"127\.0\.0\.1") as raised:
                await fetch_schema(url)
            assert "hush" not in str(raised.value)


def test_the_last_call_of_an_answer_counts_and_one_without_gets_the_expected_form() -> None:
    call = '<tool_call>{"name": "act", "arguments": {"n": 1}}</tool_call>'
    assert read_call(f"I think {call} no, {call.replace('1', '2')} it is") == ("act", {"n": 2})
    assert read_call(json.dumps({"name": "look"})) == ("look", {})
    for text in (
        "hit me",
        "[1]",
        "<tool_call>{</tool_call>",
        '{"name": 3}',
        '{"name": "a", "arguments": []}',
        "[" * 5000,
        '{"name": "a", "arguments": {"b": "\\ud800"}}',
        '{"name": "a", "arguments": {"b": %s}}' % ("[" * 400 + "]" * 400),
    ):
        with pytest.raises(ValueError, match="<tool_call>"):
            read_call(text)
