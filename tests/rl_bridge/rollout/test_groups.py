"""Groups into samples and figures."""

import pytest

from rl_bridge.rollout.groups import (
    rollout_figures,
    training_samples,
)
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn


def trajectory(
    seed: int, reward: float = 0.0, *, ending: Ending = Ending.COMPLETED, versions: tuple[int, ...] = (0,)
) -> Trajectory:
    turns = [
        Turn(
            prompt=[1, 10 + place],
            completion=Completion(tokens=[2], logprobs=[-1.0], versions=[version], stopped=True),
        )
        for place, version in enumerate(versions)
    ]
    return Trajectory(seed=seed, turns=turns, ending=ending, reward=reward)


def test_samples_carry_the_advantage_within_their_own_group() -> None:
    groups = [
        Group(seed=1, trajectories=[trajectory(1, 1.0), trajectory(1, 0.0)]),
        Group(seed=2, trajectories=[trajectory(2, 5.0, versions=(0, 0)), trajectory(2, 7.0)]),
    ]
    samples = training_samples(groups, normalize_std=False)
    # Means 0.5 and 6. The first of the second group has two rows, which share its number and advantage.
    assert [(s.trajectory, s.advantage) for s in samples] == [
        (0, 0.5),
        (1, -0.5),
        (2, -1.0),
        (2, -1.0),
        (3, 1.0),
    ]
    normalised = training_samples(groups, normalize_std=True)
    assert [s.advantage for s in normalised] == pytest.approx([1, -1, -1, -1, 1], abs=1e-5)


def test_figures_by_hand() -> None:
    groups = [
        Group(
            seed=1,
            trajectories=[
                trajectory(1, 1.0, versions=(4, 4, 4)),
                trajectory(1, -1.5, ending=Ending.ILLEGAL, versions=(4,)),
            ],
        ),
        Group(
            seed=2,
            trajectories=[
                trajectory(2, 0.0, ending=Ending.TRUNCATED_TURNS, versions=(3, 4)),
                trajectory(2, 0.0, ending=Ending.TRUNCATED_LENGTH, versions=(4, 4)),
            ],
        ),
    ]
    assert rollout_figures(groups, version=4) == {
        "reward/mean": -0.125,
        "rollout/trajectories": 4.0,
        "rollout/turns_mean": 2.0,
        "rollout/groups": 2.0,
        "rollout/zero_variance_share": 0.5,
        "rollout/truncated_share": 0.5,
        "rollout/ending/completed": 0.25,
        "rollout/ending/illegal_answer": 0.25,
        "rollout/ending/truncated_turns": 0.25,
        "rollout/ending/truncated_length": 0.25,
        "rollout/staleness/0": 0.5,
        "rollout/staleness/1": 0.5,
    }
