"""Servers killed during episodes: the episodes continue elsewhere or are reported as lost. Real processes."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from forked_servers import ForkedServers, forked_servers

from envs.blackjack_env import BlackjackEnv
from envs.blackjack_env.models import BlackjackAction
from envs.blackjack_env.server.environment import BlackjackEnvironment
from openenv_core import ConnectionLostError, EpisodeLostError

CLIENTS = 12
HANDS_TIMEOUT_S = 60

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

HUNDRED = pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(900)])


@dataclass
class Played:
    """The outcomes of the episodes of all clients."""

    hands: int = 0
    moved: int = 0
    lost: int = 0
    refused: int = 0
    playing: dict[int, str] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


def move(observation: Any, source: random.Random) -> BlackjackAction:
    return BlackjackAction(action="hit" if observation.player_total < source.randint(12, 21) else "stand")


def run_undisturbed(seed: int) -> list[Any]:
    game, source = BlackjackEnvironment(), random.Random(seed)
    observations = [game.reset(seed=seed)]
    while not observations[-1].done:
        observations.append(game.step(move(observations[-1], source)))
    return observations


async def play(number: int, urls: list[str], transport: str, played: Played, finished: asyncio.Event) -> None:
    """Play episodes; each ends as without a kill, or is reported as lost."""
    env = BlackjackEnv(urls, transport=transport)
    seed = number
    async with env:
        while not finished.is_set():
            seed += CLIENTS
            source = random.Random(seed)
            try:
                observations = [(await env.reset(seed=seed)).observation]
            except ConnectionLostError:  # no episode had begun
                played.refused += 1
                continue
            begun_at = played.playing[number] = str(env.base_url)
            played.changed.set()
            try:
                while not observations[-1].done:
                    await asyncio.sleep(random.random() * 0.02)  # the policy thinks
                    observations.append((await env.step(move(observations[-1], source))).observation)
                assert (await env.state()).step_count == len(observations) - 1
                assert observations == run_undisturbed(seed)
            except EpisodeLostError:
                played.lost += 1
            played.moved += env.base_url != begun_at
            played.hands += 1
            del played.playing[number]


async def kill(servers: ForkedServers, kills: int, played: Played) -> None:
    """Kill a server during an episode, and restart it; the other one serves meanwhile."""

    async def until(hands: int) -> None:
        async with asyncio.timeout(HANDS_TIMEOUT_S):
            while played.hands < hands or not played.playing:
                played.changed.clear()
                await played.changed.wait()

    for _ in range(kills):
        await until(played.hands + CLIENTS)  # whoever looked for a server has found one
        url = random.choice([*played.playing.values()])
        servers.kill(url)
        await until(played.hands + CLIENTS)
        servers.restart(url)


async def run(kills: int, transport: str, *, deterministic: bool) -> Played:
    played, finished = Played(), asyncio.Event()
    with forked_servers(2, deterministic=deterministic) as servers:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(play(number, servers.urls, transport, played, finished))
            await kill(servers, kills, played)
            finished.set()
    return played


@pytest.mark.parametrize("transport", ["websocket", pytest.param("http", marks=pytest.mark.soak)])
@pytest.mark.parametrize("kills", [10, HUNDRED])
async def test_every_episode_continues_like_the_undisturbed_one(kills: int, transport: str) -> None:
    played = await run(kills, transport, deterministic=True)
    assert (played.lost, played.refused) == (0, 0)
    # How many is a matter of chance: a hand may have got its last reply when its server dies.
    assert played.moved


@pytest.mark.parametrize("kills", [3, HUNDRED])
async def test_every_lost_episode_is_reported(kills: int) -> None:
    played = await run(kills, "websocket", deterministic=False)
    assert played.lost >= kills
