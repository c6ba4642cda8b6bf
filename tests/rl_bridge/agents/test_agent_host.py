"""The host of agents, ended at any moment: no key, folder or task is left."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agent_fixtures import never_end

from rl_bridge.agents.host import AgentHost
from rl_bridge.config.agent import AgentConfig
from rl_bridge.gateway.episode import CallSettings
from rl_bridge.gateway.messages import GatewayError
from rl_bridge.gateway.relayed import RelayedEpisode

MOMENTS = range(8)
"""Iterations of the event loop until something is cancelled."""


class NoTools:
    functions = ()

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def close(self) -> None:
        self.over.set()


def make_host(outputs: Path) -> AgentHost:
    agent = AgentConfig.model_validate({"function": f"agent_fixtures:{never_end.__name__}"})
    return AgentHost(agent, outputs)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[AgentHost]:
    host = make_host(tmp_path / "outputs")
    await host.start()
    yield host
    await host.close()


async def test_an_agent_that_is_cancelled_leaves_no_key_and_no_folder(
    host: AgentHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    for turns in MOMENTS:
        model: Any = None  # which is not called
        tools: Any = NoTools()
        episode = RelayedEpisode(model, CallSettings(), tools)
        messages: list[Any] = [{"role": "user", "content": "a"}]
        playing = asyncio.create_task(host.run(episode, tools, messages, time.monotonic() + 60))
        for _ in range(turns):
            await asyncio.sleep(0)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        with pytest.raises(GatewayError):
            host.gateway.find({"x-api-key": episode.key})
    await asyncio.to_thread(lambda: None)
    assert list(folders.iterdir()) == []


async def test_a_host_that_is_closed_while_it_starts_leaves_no_task(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    for turns in MOMENTS:
        host = make_host(tmp_path / "outputs")
        starting = asyncio.create_task(host.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        await host.close()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert asyncio.all_tasks() == before, turns
