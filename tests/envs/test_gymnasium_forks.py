"""Gymnasium's environments that say that they can be forked can be; those of which nothing is known do not say so."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import NormalizeObservation

from envs.gymnasium_env.models import GymnasiumAction
from envs.gymnasium_env.server.app import gymnasium_app
from envs.gymnasium_env.server.environment import GymnasiumEnvironment


def went_on(env: GymnasiumEnvironment, actions: Sequence[Any]) -> list[tuple[Any, Any, bool]]:
    seen = [env.step(GymnasiumAction(action=action)) for action in actions]
    return [(np.asarray(one.observation).tolist(), one.reward, one.done) for one in seen]


@pytest.mark.parametrize(
    ("env_id", "wrappers", "actions"),
    [
        ("CartPole-v1", [NormalizeObservation], [0, 1, 0, 1, 1, 0]),
        ("Pendulum-v1", [], [[0.5], [-1.0], [2.0], [0.0], [1.0], [1.0]]),
        ("FrozenLake-v1", [], [3] * 6),  # it slips along the first row, where there is no hole
    ],
)
def test_a_fork_goes_on_as_the_original_and_leaves_it_alone(
    env_id: str, wrappers: list[Any], actions: list[Any]
) -> None:
    def made() -> GymnasiumEnvironment:
        return GymnasiumEnvironment(env_id, wrappers)

    alone, original, other, fork = made(), made(), made(), made()
    assert original.FORKABLE
    for env in (alone, original):
        env.reset(seed=4)
        went_on(env, actions[:3])
    state = original.snapshot()
    other.restore(state)
    went_on(other, [actions[0]] * 3)
    other.reset(seed=5)
    fork.restore(state)
    assert (fork.state.step_count, fork.state.episode_id) == (3, original.state.episode_id)
    expected = went_on(alone, actions[3:])
    assert went_on(fork, actions[3:]) == expected
    assert went_on(original, actions[3:]) == expected


class Foreign(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Of which nothing is known."""


class Declared(Foreign):
    FORKABLE = True


@pytest.mark.parametrize(
    ("wrapper", "options", "forkable", "blocking"),
    [
        (NormalizeObservation, {}, True, True),
        (Foreign, {}, False, True),
        (Declared, {}, True, True),
        (None, {}, True, False),
        (None, {"render_mode": "rgb_array"}, False, True),
    ],
)
def test_only_known_environments_are_forked_and_step_on_the_event_loop(
    wrapper: Any, options: dict[str, Any], forkable: bool, blocking: bool
) -> None:
    app = gymnasium_app("CartPole-v1", [] if wrapper is None else [wrapper], **options)
    env: Any = app.sessions.factory()
    assert env.FORKABLE is forkable
    assert env.BLOCKING is blocking
    env.close()
