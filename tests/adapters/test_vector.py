"""Vectors of served environments: what Gymnasium's own give, step for step; failures of members; parts of a vector."""

import asyncio
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from serving import serving

from envs.gymnasium_env.server.app import gymnasium_app
from openenv_core.adapters.spaces import write_value
from openenv_core.adapters.vector import ServedVectorEnv


async def with_vector(app: Any, use: Callable[[ServedVectorEnv], None], count: int, **options: Any) -> None:
    """Serve an app here, and use a vector of it in a thread."""

    def played(url: str) -> None:
        envs = ServedVectorEnv(url, count, **options)
        try:
            use(envs)
        finally:
            envs.close()

    async with serving(app) as address:
        await asyncio.to_thread(played, f"http://{address}")


def plain(space: gymnasium.Space[Any], batch: Any, count: int) -> Any:
    each = gymnasium.vector.utils.iterate(gymnasium.vector.utils.batch_space(space, count), batch)
    return [write_value(space, one) for one in each]


def assert_same_infos(here: dict[str, Any], there: dict[str, Any], space: Any) -> None:
    # What JSON cannot say is left out.
    here = {key: value for key, value in here.items() if key.strip("_") != "secret"}
    assert here.keys() == there.keys()
    for key, value in here.items():
        if key == "final_obs":
            for one, other in zip(value, there[key], strict=True):
                assert (one is None) == (other is None)
                assert one is None or write_value(space, one) == write_value(space, other)
        elif isinstance(value, dict):
            assert_same_infos(value, there[key], space)
        else:
            np.testing.assert_array_equal(value, there[key])
            assert value.dtype == there[key].dtype


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "Blackjack-v1", "gym_worlds:Mixed-v0", "gym_worlds:Picture-v0"]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
async def test_a_vector_is_what_gymnasium_makes_of_it(env_id: str, mode: str) -> None:
    count = 3

    def use(envs: ServedVectorEnv) -> None:
        local = SyncVectorEnv([lambda: gymnasium.make(env_id)] * count, autoreset_mode=mode)
        assert envs.num_envs == count
        assert envs.observation_space == local.observation_space
        assert envs.action_space == local.action_space
        assert envs.metadata["autoreset_mode"] is local.metadata["autoreset_mode"]
        space = envs.single_observation_space
        envs.action_space.seed(5)
        seeds: list[Any] = [7, [4, 5, 6]]
        for seed in seeds:
            begun, other_begun = local.reset(seed=seed), envs.reset(seed=seed)
            assert plain(space, begun[0], count) == plain(space, other_begun[0], count)
            ends = 0
            for _ in range(40):
                actions = envs.action_space.sample()
                here, there = local.step(actions), envs.step(actions)
                assert plain(space, here[0], count) == plain(space, there[0], count)
                for one, other in zip(here[1:4], there[1:4], strict=True):
                    np.testing.assert_array_equal(one, other)
                    assert one.dtype == other.dtype
                assert_same_infos(here[4], there[4], space)
                ends += int((here[2] | here[3]).sum())
            assert ends > 2
        local.close()

    await with_vector(gymnasium_app(env_id), use, count, autoreset_mode=mode)
