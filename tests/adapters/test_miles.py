"""The agent function of Miles plays a served environment, with an endpoint in the place of its session server."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from chat_server import chat_server
from counter import fragile_app
from serving import serving

from openenv_core.errors import ConnectionFailedError

pytestmark = pytest.mark.heavy


@asynccontextmanager
async def policy(*answers: str) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """An endpoint that gives these answers, one after the other; yields its address and the chats that it saw."""
    messages = [{"content": answer, "reasoning_content": "Hm."} for answer in answers]
    with chat_server(*messages) as server:
        yield f"http://127.0.0.1:{server.port}/session/1", server.requests


def act(amount: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'act', 'arguments': {'amount': amount}})}</tool_call>"


def sample(metadata: dict[str, Any]) -> Any:
    return SimpleNamespace(metadata=metadata)


async def test_an_episode_is_played_and_its_reward_is_the_environments() -> None:
    from openenv_core.adapters.miles import keep_group, reward_func, run

    async with serving(fragile_app) as address, policy("What?", act(3)) as (url, chats):
        row = {"openenv": {"base_url": f"http://{address}", "reset": {"start": 2}}}
        found = await run(url, "Count.", {"temperature": 0.5}, row)
        assert found == {"reward": 3.0, "failure": None}
        assert chats[0]["temperature"] == 0.5
        assert [message["role"] for message in chats[1]["messages"]] == ["user", "user", "assistant", "user"]
        assert '"total": 2' in chats[0]["messages"][1]["content"]
        assert chats[1]["messages"][2]["reasoning_content"] == "Hm."
        group = [sample(found), sample({"reward": 1.0})]
        assert await reward_func(None, group) == [3.0, 1.0]
        assert await reward_func(None, group[0]) == 3.0
        assert keep_group(None, group)


async def test_infrastructure_failure_drops_the_group() -> None:
    from openenv_core.adapters.miles import keep_group, run

    async with serving(fragile_app) as address, policy(act(7)) as (url, _):
        row: dict[str, Any] = {"openenv": {"base_url": f"http://{address}", "reset_timeout_s": 0.2}}
        found = await run(url, [{"role": "user", "content": "Count."}], None, row)
        assert found == {"reward": None, "failure": "no disk"}
        assert not keep_group(None, [sample({"reward": 1.0}), sample(found)])
        assert not keep_group(None, [[sample({"reward": 1.0})], [sample({})]])  # the function had raised
    with pytest.raises(ConnectionFailedError):
        await run(url, "Count.", None, row)


async def test_policy_without_calls_ends_after_its_turns() -> None:
    from openenv_core.adapters.miles import run

    async with serving(fragile_app) as address, policy("a", "b", "c") as (url, chats):
        row = {"openenv": {"base_url": f"http://{address}", "max_turns": 2, "unfinished_reward": -1.0}}
        assert (await run(url, "Count.", None, row))["reward"] == -1.0
        assert len(chats) == 2
