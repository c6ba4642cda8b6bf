"""Environments of Gymnasium's, served and taken back: the same spaces and trajectories, and its own checks."""

import importlib.util
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest
from counter import Add, Count, Counter, Diverging, Unscored
from gym_worlds import MIXED
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from missing import missing
from serving import served

from envs.blackjack_env.server.app import app as blackjack
from envs.gymnasium_env.models import GymnasiumAction
from envs.gymnasium_env.server.app import gymnasium_app
from envs.gymnasium_env.server.environment import QuickGymnasiumEnvironment
from openenv_core import Action
from openenv_core.adapters.gymnasium import ServedEnv
from openenv_core.adapters.spaces import Fields, describe_space, read_space, read_value, write_value
from openenv_core.adapters.vector import ServedVectorEnv
from openenv_core.errors import ConfigurationError, EnvironmentFailureError, EpisodeOverError, ExecutionError
from servers import create_app

ALL = [
    "CartPole-v1",
    "Blackjack-v1",
    "FrozenLake-v1",
    "Taxi-v4",
    "Pendulum-v1",
    "Acrobot-v1",
    "gym_worlds:Mixed-v0",
    "gym_worlds:Picture-v0",
]


@contextmanager
def served_env(app: Any, **options: Any) -> Iterator[ServedEnv]:
    with served(app) as address, ServedEnv(f"http://{address}", **options) as env:
        yield env


def assert_same(here: Any, there: Any, env: ServedEnv) -> None:
    assert env.observation_space.contains(there)
    # Some of Gymnasium's environments give plain numbers where their spaces have numpy's.
    assert write_value(env.observation_space, here) == write_value(env.observation_space, there)


@pytest.mark.parametrize("env_id", ALL)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of bounds that are its own
def test_an_environment_comes_back_as_it_was(env_id: str) -> None:
    with served_env(gymnasium_app(env_id)) as env:
        check_env(env, skip_render_check=True, skip_close_check=True)
        local = gymnasium.make(env_id)
        assert env.observation_space == local.observation_space
        assert env.action_space == local.action_space
        for seed in (7, 8):
            env.action_space.seed(seed)
            assert_same(local.reset(seed=seed)[0], env.reset(seed=seed)[0], env)
            for _ in range(60):
                action = env.action_space.sample()
                here, there = local.step(action), env.step(action)
                assert_same(here[0], there[0], env)
                assert [float(here[1]), *here[2:4]] == [*there[1:4]]
                if here[2] or here[3]:
                    break
        local.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_environment_of_ours_has_spaces_by_its_schema() -> None:
    with served_env(blackjack) as env:
        assert env.action_space == spaces.Discrete(2)
        assert env.observation_space["dealer_card"] == spaces.Discrete(10, start=1)
        check_env(env, skip_render_check=True, skip_close_check=True)
        seen, _ = env.reset(seed=1)
        assert seen["text"].startswith("You hold")
        _, reward, terminated, truncated, _ = env.step(1)  # the second of "hit" and "stand"
        assert (terminated, truncated) == (True, False)
        assert reward in (-1, 0, 1)


def test_options_pictures_infos_and_truncation_cross_the_wire() -> None:
    app = gymnasium_app("gym_worlds:Mixed-v0", render_mode="rgb_array")
    with served_env(app, render_mode="rgb_array") as env:
        env.reset(seed=1, options={"steps": 2})
        action = {"move": 1, "force": np.array([0.5, 0.25], np.float32)}
        _, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated, info) == (0.75, False, False, {"left": 1})
        assert env.render().tolist() == np.full((4, 6, 3), 1).tolist()
        assert env.step(action)[2:4] == (False, True)


@pytest.mark.slow
def test_server_may_have_tokens() -> None:
    token = "a-token-of-its-own"
    with ServedEnv("blackjack", env_vars={"ROPEWALK_TOKENS": token}) as env:
        assert env.reset(seed=1)[0]["text"].startswith("You hold")
        url = env._client.base_url
        ServedVectorEnv(url, 2, headers={"Authorization": f"Bearer {token}"}).close()


def test_field_info_that_is_text_is_no_info_of_gymnasium() -> None:
    class Told(Count):
        info: str = "it begins"

    class Telling(Counter):
        def reset(self, **options: Any) -> Count:
            return Told()

    with served_env(create_app(Telling, Add, Told)) as env:
        observation, info = env.reset()
        assert (observation["info"], info) == ("it begins", {})


def test_episode_that_failed_is_an_error_and_one_without_a_score_has_nan_as_its_reward() -> None:
    class FailsTwice(Unscored):
        def reset(self, *, mark: str = "", **options: Any) -> Count:
            return Count(metadata={mark: "the disk is full"})

    with served_env(create_app(FailsTwice, Add, Count)) as env:
        with pytest.raises(EnvironmentFailureError, match="does not count: the disk is full"):
            env.reset(options={"mark": "infrastructure_error"})
        env.reset()
        _, reward, terminated, _, info = env.step(np.int64(1))
        assert (math.isnan(reward), terminated, info) == (True, True, {"unscored": "the disk is full"})
    with served_env(create_app(Diverging, Add, Count)) as env:
        env.reset()
        rewards, infos = [], []
        for amount in (1, 0, 9):
            _, reward, _, _, info = env.step(np.int64(amount))
            rewards.append(reward)
            infos.append(info)
        assert str(rewards) == "[1.0, nan, nan]"  # whose sum is no number
        assert infos == [{}, *[{"unscored": "the reward is nan"}] * 2]
        env.reset()
        assert env.step(np.int64(1))[1] == 1.0


@pytest.mark.heavy
def test_ppo_of_stable_baselines_learns_over_the_wire_what_it_learns_without() -> None:
    import torch

    if importlib.util.find_spec("stable_baselines3") is None:
        missing("needs stable-baselines3; python3.11 scripts/bootstrap.py test-all installs it")
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    served = next(
        block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "PPO" in block
    )
    local = re.sub(r"ServedEnv\(.*\) as", 'gymnasium.make("CartPole-v1") as', f"import gymnasium\n{served}")
    assert local.count("ServedEnv") == 1  # its import: nothing else is another line

    def learn(script: str) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        exec(script, shown)
        learnt: dict[str, Any] = shown["policy"].policy.state_dict()
        return learnt

    here, there, fresh = learn(local), learn(served), learn(local.replace("learn(512)", "learn(0)"))
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert not any(torch.equal(here[name], fresh[name]) for name in here)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Blackjack-v1"])
def test_quick_environment_refuses_what_gymnasium_refuses(env_id: str) -> None:
    served = QuickGymnasiumEnvironment(env_id)
    with pytest.raises(EpisodeOverError):
        served.step(GymnasiumAction(action=1))
    local = gymnasium.make(env_id).action_space
    assert served.inner.action_space == local
    for value in (0, 1, 2, -1, True, 1.0, "1", *map(np.int64, (0, 1, 2, -1)), np.int32(1), np.array(1)):
        assert served.inner.action_space.contains(value) is local.contains(value)
    served.close()


def test_an_action_outside_of_the_space_is_refused_and_the_episode_goes_on() -> None:
    with served_env(gymnasium_app("CartPole-v1")) as env:
        env.reset(seed=1)
        for wrong in (2, -1, 1.5, True, "left", [1], None):
            with pytest.raises(ExecutionError, match="no action of Discrete"):
                env._client.step({"action": wrong})
        env.step(1)


def test_first_wrapper_is_the_innermost() -> None:
    limits = [lambda env, steps=steps: gymnasium.wrappers.TimeLimit(env, steps) for steps in (2, 3)]
    with served_env(gymnasium_app("CartPole-v1", limits)) as env:
        env.reset(seed=1)
        assert [env.step(1)[3] for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    "space",
    [
        MIXED,
        spaces.Box(np.array([-np.inf, 0]), np.array([1, np.inf]), dtype=np.float64),
        spaces.Box(-np.inf, np.inf, (2, 2), np.float32),
        spaces.Sequence(spaces.Discrete(4), stack=True),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
    ],
    ids=str,
)
def test_spaces_and_values_are_the_same_after_the_wire(space: spaces.Space[Any]) -> None:
    again = read_space(describe_space(space))
    assert again == space
    space.seed(3)
    for _ in range(20):
        value = space.sample()
        assert space.contains(read_value(again, write_value(space, value)))
        assert write_value(again, read_value(again, write_value(space, value))) == write_value(space, value)


@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"minimum": 1},
        {"maximum": -1},
        {"minimum": 0, "maximum": 2**63 - 1},
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"minimum": 0, "maximum": 2**64 - 1},
        {"minimum": 2**62, "maximum": 2**62 + 1},
    ],
    ids=str,
)
def test_integers_of_any_range_are_sampled(bounds: dict[str, int]) -> None:
    fields = Fields({"properties": {"number": {"type": "integer", **bounds}}})
    fields.space.seed(1)
    samples = [fields.space.sample() for _ in range(20)]
    assert len({int(sample) for sample in samples}) > 1
    for sample in samples:
        assert fields.space.contains(fields.read(fields.write(sample)))
        assert bounds.get("minimum", -(2**63)) <= sample <= bounds.get("maximum", 2**63)


def test_field_with_one_value_has_it_in_every_sample() -> None:
    properties = {"kind": {"const": "move", "type": "string"}, "steps": {"enum": [1, 2]}}
    fields = Fields({"properties": properties})
    action = fields.write(fields.space.sample())
    assert action["kind"] == "move"
    assert fields.space.contains(fields.read(action))


def test_unsupported_spaces_are_refused() -> None:
    for described in (
        {},
        {"type": "Graph"},
        {"type": "Box"},
        {"type": "Discrete", "n": 0, "start": 0, "dtype": "int64"},
    ):
        with pytest.raises(ConfigurationError, match="describes no space"):
            read_space(described)
    with pytest.raises(ConfigurationError, match="Graph"):
        describe_space(spaces.Graph(spaces.Discrete(2), None))


def test_choices_that_may_be_null_or_several_are_no_text() -> None:
    class Colour(StrEnum):
        RED = "red"
        BLUE = "blue"

    class Paint(Action):
        colour: Literal["red", "blue"] | None = None
        more: list[Literal[3, 5]]
        kind: Colour | None = None
        kinds: list[Colour]
        note: str | None = None

    fields = Fields(Paint.model_json_schema())
    choice, several = spaces.Discrete(3), spaces.Sequence(spaces.Discrete(2))
    found = [fields.parts[name].space for name in ("colour", "more", "kind", "kinds")]
    assert found == [choice, several, choice, several]
    assert isinstance(fields.parts["note"].space, spaces.Text)
    for _ in range(20):
        written = fields.write(fields.space.sample())
        Paint.model_validate(written)
        read = fields.read(written)
        assert fields.space.contains(read)
        assert fields.write(read) == written
    first = {"colour": 0, "more": (1, 0), "kind": 2, "kinds": (), "note": ""}
    assert fields.write(first) == {"colour": None, "more": [5, 3], "kind": "blue", "kinds": [], "note": None}
