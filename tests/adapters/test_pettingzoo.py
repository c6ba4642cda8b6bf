"""Environments of PettingZoo's, served and taken back: the same trajectories, and its own checks over the wire."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from games import Rounds, Turns
from serving import served

from openenv_core.errors import ConfigurationError, ValidationFailedError

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore"),
]  # of what PettingZoo thinks of its own spaces

pettingzoo = pytest.importorskip("pettingzoo")  # in no environment of CI
with warnings.catch_warnings(action="ignore"):
    from pettingzoo.test import api_test, parallel_api_test, seed_test

from envs.blackjack_env.server.app import app as blackjack  # noqa: E402
from envs.kuhn_env.server.app import app as kuhn  # noqa: E402
from envs.pettingzoo_env.server.app import pettingzoo_app  # noqa: E402
from openenv_core import GenericEnvClient  # noqa: E402
from openenv_core.adapters.pettingzoo import ServedAECEnv, ServedParallelEnv  # noqa: E402
from openenv_core.adapters.vector import ServedVectorEnv  # noqa: E402
from servers import create_app  # noqa: E402

CLASSIC = [
    "tictactoe-v3",
    "connect_four-v3",
    "rps-v2",
    "chess-v6",
    "go-v5",
    "leduc_holdem-v4",
    "texas_holdem-v4",
    "texas_holdem_no_limit-v6",
    "hanabi-v5",
]
AEC = [f"classic/{name}" for name in CLASSIC] + ["butterfly/cooperative_pong-v6", "sisl/pursuit-v5"]
PARALLEL = ["classic/rps-v2", "butterfly/cooperative_pong-v6", "sisl/pursuit-v5"]


@contextmanager
def url_of(app: Any) -> Iterator[str]:
    with served(app) as address:
        yield f"http://{address}"


def play(env: Any, seed: int, steps: int) -> list[Any]:
    """Play at random, within the mask; return what each agent saw."""
    rng, seen = np.random.default_rng(seed), []
    env.reset(seed=seed)
    for agent in env.agent_iter(steps):
        observation, reward, terminated, truncated, info = env.last()
        seen.append((agent, observation, float(reward), terminated, truncated))
        if terminated or truncated:
            if (
                isinstance(observation, dict) and "action_mask" in observation
            ):  # which depends on when it is read
                seen[-1] = (agent, observation["observation"], *seen[-1][2:])
            env.step(None)
            continue
        space = env.action_space(agent)
        space.seed(int(rng.integers(2**31)))
        mask = observation.get("action_mask") if isinstance(observation, dict) else info.get("action_mask")
        env.step(space.sample() if mask is None else space.sample(np.asarray(mask, np.int8)))
    return seen


def assert_same(here: Any, there: Any) -> None:
    assert len(here) == len(there)
    for local, remote in zip(here, there, strict=True):
        assert (local[0], *local[2:]) == (remote[0], *remote[2:])
        np.testing.assert_equal(local[1], remote[1])


@pytest.mark.parametrize("env_id", AEC)
def test_an_environment_comes_back_as_it_was(env_id: str) -> None:
    with url_of(pettingzoo_app(env_id)) as url:
        env, local = ServedAECEnv(url), pettingzoo.make("aec", env_id)
        for agent in env.possible_agents:
            assert env.action_space(agent) == local.action_space(agent)
            assert env.observation_space(agent) == local.observation_space(agent)
        for seed in (3, 4):
            assert_same(play(local, seed, 60), play(env, seed, 60))
        api_test(env, num_cycles=20)
        env.close()
        seed_test(lambda: ServedAECEnv(url), num_cycles=10)


@pytest.mark.parametrize("api", ["aec", "parallel"])
@pytest.mark.parametrize("env_id", PARALLEL)
def test_a_parallel_environment_comes_back_as_it_was(env_id: str, api: str) -> None:
    with url_of(pettingzoo_app(env_id, api)) as url:
        env, local = ServedParallelEnv(url), pettingzoo.make("parallel", env_id)
        parallel_api_test(env, num_cycles=20)
        np.testing.assert_equal(local.reset(seed=5)[0], env.reset(seed=5)[0])
        for turn in range(20):
            actions = {}
            for number, agent in enumerate(local.agents):
                env.action_space(agent).seed(100 * turn + number)
                actions[agent] = env.action_space(agent).sample()
            here, there = local.step(actions), env.step(actions)
            np.testing.assert_equal(here[:4], there[:4])
            assert local.agents == env.agents
            if not local.agents:
                break
        env.close()


def test_a_game_of_ours_is_one_of_pettingzoos() -> None:
    with url_of(kuhn) as url:
        env = ServedAECEnv(url)
        seen = play(env, 3, 100)
        assert sum(reward for _, _, reward, *_ in seen) == 0
        assert seen == play(env, 3, 100)
        env.close()


class Twice(Turns):
    """Each seat acts twice in a row."""

    @property
    def turn(self) -> tuple[str]:
        return (self.seats[self.round // 2],)


def test_a_game_of_turns_is_no_parallel_environment() -> None:
    with url_of(create_app(Rounds)) as url:
        env = ServedParallelEnv(url)
        env.reset(seed=1)
        for _ in range(3):
            assert env.step(dict.fromkeys("abc", 5))[1] == dict.fromkeys("abc", 5)
        assert env.agents == []
        env.close()
    with url_of(create_app(Twice)) as url:
        env = ServedParallelEnv(url)
        env.reset(seed=1)
        with pytest.raises(ConfigurationError, match="use ServedAECEnv"):
            env.step(dict.fromkeys("abc", 5))
        env.close()


def test_one_agent_is_a_gymnasium_environment_and_a_vector_of_them() -> None:
    with url_of(pettingzoo_app("classic/tictactoe-v3")) as url:
        envs = ServedVectorEnv(url, 8)  # the server plays the other agent at random
        envs.reset(seed=1)
        for _ in range(5):
            envs.step(np.arange(8) % 9)
        envs.close()
        with GenericEnvClient(url).sync() as client:
            client.reset(seat="player_2")
            with pytest.raises(ValidationFailedError, match="this is no action of"):
                client.step({"action": 12})


def test_an_environment_of_one_player_is_refused() -> None:
    with url_of(blackjack) as url, pytest.raises(ConfigurationError, match="an environment without seats"):
        ServedAECEnv(url)
