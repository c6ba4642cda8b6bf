"""Vectors of served environments: equal to Gymnasium's own step for step; failing members; partial steps."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import gymnasium
import numpy as np
import pytest
from counter import Add, Count, Counter, Diverging, Failing
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from pydantic import Field
from serving import eventually, served, serving

from envs.blackjack_env.server.app import app as blackjack
from envs.gymnasium_env.server.app import gymnasium_app
from openenv_core import Observation
from openenv_core.adapters.spaces import write_value
from openenv_core.adapters.vector import MembersFailedError, ServedVectorEnv
from openenv_core.errors import CapacityError, ConfigurationError, EnvironmentFailureError, ExecutionError
from servers import create_app


@contextmanager
def served_vector(app: Any, count: int, **options: Any) -> Iterator[ServedVectorEnv]:
    with served(app) as address, closing(ServedVectorEnv(f"http://{address}", count, **options)) as envs:
        yield envs


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
    "env_id",
    ["CartPole-v1", "Blackjack-v1", "gym_worlds:Mixed-v0", "gym_worlds:Picture-v0", "gym_worlds:Bytes-v0"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_vector_is_what_gymnasium_makes_of_it(env_id: str, mode: str) -> None:
    count = 3

    with served_vector(gymnasium_app(env_id), count, autoreset_mode=mode) as envs:
        local = SyncVectorEnv([lambda: gymnasium.make(env_id)] * count, autoreset_mode=mode)
        assert envs.num_envs == count
        assert envs.observation_space == local.observation_space
        assert envs.action_space == local.action_space
        assert envs.metadata["autoreset_mode"] is local.metadata["autoreset_mode"]
        space = envs.single_observation_space
        envs.action_space.seed(5)
        seeds: list[Any] = [7, [4, 5, 6]]
        for seed in seeds:
            expected_reset, actual_reset = local.reset(seed=seed), envs.reset(seed=seed)
            assert plain(space, expected_reset[0], count) == plain(space, actual_reset[0], count)
            ends = 0
            for _ in range(30 if env_id == "CartPole-v1" else 9):
                actions = envs.action_space.sample()
                here, there = local.step(actions), envs.step(actions)
                assert plain(space, here[0], count) == plain(space, there[0], count)
                for one, other in zip(here[1:4], there[1:4], strict=True):
                    np.testing.assert_array_equal(one, other)
                    assert one.dtype == other.dtype
                assert_same_infos(here[4], there[4], space)
                ends += int((here[2] | here[3]).sum())
            assert ends > 1
        local.close()


def test_partial_reset_repeats_the_last_observation_of_the_others() -> None:
    with served_vector(gymnasium_app("CartPole-v1"), 3) as envs:
        first, _ = envs.reset(seed=[1, 2, 3])
        mask = np.array([False, True, False])
        again, _ = envs.reset(seed=[7, 8, 9], options={"reset_mask": mask})
        local = gymnasium.make("CartPole-v1")
        assert again[1].tolist() == local.reset(seed=8)[0].tolist()
        assert again[[0, 2]].tolist() == first[[0, 2]].tolist()
        for wrong in (mask[:2], np.zeros(3, bool), [True] * 3):
            with pytest.raises(ValueError, match="reset_mask"):
                envs.reset(options={"reset_mask": wrong})
        with pytest.raises(ValueError, match="seed for each of 3"):
            envs.reset(seed=[1, 2])


def test_failure_of_one_member_comes_with_the_steps_of_the_others() -> None:
    with served_vector(gymnasium_app("CartPole-v1"), 3) as envs:
        envs.reset(seed=1)
        with pytest.raises(MembersFailedError, match=r"environment 1 .* no action of Discrete") as caught:
            envs.step(np.array([1, 2, 0]))
        assert [type(error) for error in caught.value.errors.values()] == [ExecutionError]
        steps = caught.value.steps
        assert steps.rewards.tolist() == [1, 0, 1]
        assert steps.observations[1].tolist() == [0] * 4
        assert steps.observations[[0, 2]].any(axis=1).all()
        # The vector goes on, and so does the episode of the one.
        assert envs.step(np.array([1, 1, 0]))[1].tolist() == [1, 1, 1]
        with pytest.raises(ValueError, match="expected values of int64"):
            envs.step(np.array([0.5, 1.0, 0.0]))
        with pytest.raises(MembersFailedError) as caught:
            envs.step(np.array([1, 2, 0]))
        again, _ = envs.reset(options={"reset_mask": np.array([False, True, False])})
        assert again[[0, 2]].tolist() == caught.value.steps.observations[[0, 2]].tolist()


def test_steps_are_sent_and_received_apart() -> None:
    with served_vector(gymnasium_app("CartPole-v1"), 4) as envs:
        observations, _ = envs.reset(seed=1)
        with pytest.raises(ConfigurationError, match="call send first"):
            envs.recv()
        envs.send(np.array([0, 1]), members=[3, 1], at_least=2)
        envs.send(np.array([1, 0]), members=[0, 2])
        seen: dict[int, Any] = {}
        while len(seen) < 4:
            steps = envs.recv()
            assert steps.rewards.tolist() == [1] * len(steps.members)
            seen |= dict(zip(steps.members.tolist(), steps.observations, strict=True))
        for member, action in ((3, 0), (1, 1), (0, 1), (2, 0)):
            local = gymnasium.make("CartPole-v1")
            assert local.reset(seed=1 + member)[0].tolist() == observations[member].tolist()
            assert local.step(action)[0].tolist() == seen[member].tolist()


def test_an_environment_of_ours_has_text_and_numbers_of_each() -> None:
    with served_vector(blackjack, 2) as envs:
        assert envs.single_action_space == spaces.Discrete(2)
        seen, _ = envs.reset(seed=1)
        assert len(seen["text"]) == 2
        assert seen["dealer_card"].dtype == np.int64
        _, rewards, terminations, truncations, _ = envs.step(np.array([1, 1]))  # both stand
        assert (terminations.tolist(), truncations.tolist()) == ([True] * 2, [False] * 2)
        assert set(rewards.tolist()) <= {-1.0, 0.0, 1.0}
        assert envs.step(np.array([1, 1]))[2].tolist() == [False, False]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_episode_of_a_member_that_failed_does_not_count(mode: str) -> None:
    app = create_app(Failing, Add, Count, max_concurrent_envs=2)
    with served_vector(app, 1, autoreset_mode=mode) as envs:
        envs.reset()
        with pytest.raises(MembersFailedError, match="does not count: the disk is full") as caught:
            envs.step(np.array([1]))
        assert isinstance(caught.value.errors[0], EnvironmentFailureError)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_rewards_of_a_member_without_a_score_are_nan_to_the_end_of_its_episode(mode: str) -> None:
    app = create_app(Diverging, Add, Count, max_concurrent_envs=2)
    with served_vector(app, 2, autoreset_mode=mode) as envs:
        envs.reset(seed=[0, 1])
        assert str(envs.step(np.array([1, 0]))[1].tolist()) == "[1.0, nan]"
        _, rewards, terminations, _, infos = envs.step(np.array([1, 9]))
        assert (str(rewards.tolist()), terminations.tolist()) == ("[1.0, nan]", [False, True])
        infos = infos.get("final_info", infos)
        assert (infos["unscored"].tolist(), infos["_unscored"].tolist()) == (
            [None, "the reward is nan"],
            [False, True],
        )
        if mode == "NextStep":
            _, rewards, *_ = envs.step(np.array([1, 1]))
            assert rewards.tolist() == [1.0, 0.0]  # that of a reset
        _, rewards, _, _, infos = envs.step(np.array([1, 1]))
        assert (rewards.tolist(), infos) == ([1.0, 1.0], {})


class Tree(Observation):
    branches: "list[Tree]" = Field(default_factory=list)


def test_a_vector_that_has_no_spaces_takes_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_requests = []
    app = create_app(Counter, Add, Tree, max_concurrent_envs=2)
    take = app.sessions.slots.acquire
    monkeypatch.setattr(
        app.sessions.slots, "acquire", lambda *args: slot_requests.append(args) or take(*args)
    )
    with pytest.raises(ConfigurationError), served_vector(app, 1):
        pass
    assert not slot_requests


def test_too_large_vector_is_refused_and_closing_frees_all_slots() -> None:
    app = gymnasium_app("CartPole-v1", max_concurrent_envs=4)

    with served_vector(app, 3) as envs:
        assert app.sessions.active == 3
        with pytest.raises(CapacityError, match="no 2 free slots for a session: 3 of 4"):
            ServedVectorEnv(envs._server.base_url, 2, queue_timeout_s=0)
        assert app.sessions.active == 3
    assert app.sessions.active == 0


async def test_dropped_vector_ends_its_sessions() -> None:
    app = gymnasium_app("CartPole-v1", max_concurrent_envs=4)
    async with serving(app) as address:
        await asyncio.to_thread(lambda: ServedVectorEnv(f"http://{address}", 3).reset())
        gc.collect()
        await eventually(lambda: app.sessions.active == 0)
