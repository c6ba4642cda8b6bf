"""A fleet on a Ray cluster of four raylets on this machine, whose CPUs are fictitious."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_process import SUPPORT, eventually

from envs.blackjack_env import BlackjackAction, BlackjackEnv
from openenv_core import GenericEnvClient, make
from openenv_core.cli.fleet import COMMAND
from openenv_core.cli.main import run
from openenv_core.client.tools import MCPToolClient
from openenv_core.errors import CapacityError, EpisodeLostError, ProviderError
from openenv_core.providers.fleet import read_load

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SERVERS = 8
SESSIONS = 2000
EPISODES = 3
KILLED_ACTORS = 6
KILLED_RAYLETS = (2, 4)
"""After which of the killed actors a raylet is killed too, with the actors that it has."""
PAUSE_S = 3.0
OBJECT_STORE_BYTES = 100 << 20

ray: Any = pytest.importorskip("ray")  # in no environment of CI


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    node = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", f"{ROOT}:{SUPPORT}")
    cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0})
    patch.setenv("RAY_ADDRESS", cluster.address)
    for _ in range(4):
        cluster.add_node(**node, num_cpus=SERVERS)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    patch.undo()


async def play(env: BlackjackEnv, number: int) -> list[Any]:
    """Play episodes that follow from the number; return everything that was observed."""
    seen: list[Any] = []
    for episode in range(EPISODES):
        result = await env.reset(seed=EPISODES * number + episode)
        while not result.done:
            seen.append(result.observation.model_dump())
            wanted = "hit" if result.observation.player_total < 17 else "stand"
            result = await env.step(BlackjackAction(action=wanted))
        seen.append((result.observation.model_dump(), result.reward))
    return seen


async def in_fleet(act: Callable[[BlackjackEnv, list[BlackjackEnv]], Awaitable[None]], sessions: int) -> None:
    """Open the sessions on a fleet, some at a time, and act on them."""
    async with make(
        "blackjack", fleet="ray", servers=SERVERS, start_timeout_s=300.0, message_timeout_s=300.0
    ) as root:
        at_once = asyncio.Semaphore(64)

        async def open_one() -> BlackjackEnv:
            async with at_once:
                return await root.new_session()

        await act(root, await asyncio.gather(*(open_one() for _ in range(sessions))))


def test_episodes_of_a_deterministic_environment_outlive_actors_and_raylets(
    cluster: Any, record_testsuite_property: Callable[[str, object], None]
) -> None:
    async def act(root: BlackjackEnv, envs: list[BlackjackEnv]) -> None:
        fleet = root._session.servers.provider
        loads = [read_load(url, fleet.token) for url in fleet.urls()]
        counts = [load.in_use for load in loads if load is not None]
        assert len(counts) == SERVERS
        assert max(counts) <= 1.5 * min(counts), counts
        record_testsuite_property("sessions of each server", counts)
        undisturbed = await asyncio.gather(*(play(env, number) for number, env in enumerate(envs)))

        chosen = random.Random(7)
        ended = threading.Event()

        def kill() -> None:
            for number in range(KILLED_ACTORS):
                name = f"{fleet.name}-{chosen.randrange(SERVERS)}"
                ray.kill(ray.get_actor(name, "ropewalk"), no_restart=False)
                if number in KILLED_RAYLETS:
                    cluster.remove_node(
                        chosen.choice(sorted(cluster.worker_nodes, key=id)), allow_graceful=False
                    )
                if ended.wait(PAUSE_S):
                    return

        killing = asyncio.create_task(asyncio.to_thread(kill))
        try:
            assert (
                await asyncio.gather(*(play(env, number) for number, env in enumerate(envs))) == undisturbed
            )
        finally:
            ended.set()
            await killing
        record_testsuite_property("raylets left", len(cluster.worker_nodes))
        await asyncio.to_thread(fleet.wait_ready, SERVERS)

    asyncio.run(in_fleet(act, SESSIONS))


def test_no_error_in_a_rolling_update_under_load(
    cluster: Any, record_testsuite_property: Callable[[str, object], None]
) -> None:
    async def act(root: BlackjackEnv, envs: list[BlackjackEnv]) -> None:
        fleet = root._session.servers.provider
        expected = await asyncio.gather(*(play(env, number) for number, env in enumerate(envs)))
        rolling = asyncio.create_task(asyncio.to_thread(fleet.roll))
        rounds = 0
        while not rolling.done():
            assert await asyncio.gather(*(play(env, number) for number, env in enumerate(envs))) == expected
            rounds += 1
        await rolling
        assert len(fleet.urls()) == SERVERS
        record_testsuite_property("rounds of all sessions during the update", rounds)

    asyncio.run(in_fleet(act, 200))


def test_other_episodes_are_reported_lost(cluster: Any) -> None:
    with make("tally:app", client=MCPToolClient, fleet="ray", servers=2) as env:
        env.reset()
        env.call_tool("add", amount=1)
        fleet = env.async_client._session.servers.provider
        (server,) = (each for each in fleet.servers() if each.url == env.base_url)
        ray.kill(ray.get_actor(server.name, "ropewalk"), no_restart=False)
        eventually(lambda: read_load(server.url, fleet.token) is None)
        with pytest.raises(EpisodeLostError):
            env.call_tool("add", amount=1)
        env.reset()
        assert env.call_tool("add", amount=1) == 1
        fleet.wait_ready(2)


def test_why_a_server_does_not_start_is_said_at_once(cluster: Any) -> None:
    with pytest.raises(ProviderError, match="no_such_module"):
        make("no_such_module:app", client=GenericEnvClient, fleet="ray").connect()


def test_the_command_scales_in_without_ending_a_session(
    cluster: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(COMMAND, ["up", "ray", "games", "tally:app", "--servers", "3"]) == 0
    token = (tmp_path / "games.token").read_text().strip()
    urls = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    try:
        assert len(urls) == 3
        with MCPToolClient(urls[2], token=token).sync() as env:
            env.reset()
            assert run(COMMAND, ["scale", "ray", "games", "1", "--timeout", "1"]) == 2
            assert "games-2" in capsys.readouterr().err
            assert [env.call_tool("add", amount=1) for _ in range(3)] == [1, 2, 3]
            with (
                MCPToolClient(urls[2], token=token, queue_timeout_s=0).sync() as another,
                pytest.raises(CapacityError, match="is stopping"),
            ):
                another.reset()
        assert run(COMMAND, ["scale", "ray", "games", "1"]) == 0
        assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == urls[:1]
        assert run(COMMAND, ["drain", "ray", "games"]) == 0
        assert run(COMMAND, ["status", "ray", "games"]) == 0
        assert "0 of" in capsys.readouterr().out
    finally:
        assert run(COMMAND, ["down", "ray", "games"]) == 0
    assert run(COMMAND, ["status", "ray", "games"]) == 2
