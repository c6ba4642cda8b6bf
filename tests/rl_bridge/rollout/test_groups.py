"""Groups into samples and figures."""

from collections import Counter

import pytest

from rl_bridge.rollout.assignment import Absence, NoTrajectory
from rl_bridge.rollout.filters import NO_VARIANCE, Overlong
from rl_bridge.rollout.groups import rollout_figures, training_samples
from rl_bridge.rollout.tally import Tally
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn

UNSEEN = (
    "unparsable_call",
    "refused_action",
    "truncated_time",
    "failed_policy",
    "failed_environment",
    "failed_reward",
)


def trajectory(
    seed: int,
    reward: float = 0.0,
    *,
    ending: Ending = Ending.COMPLETED,
    versions: tuple[int, ...] = (0,),
    tool_calls: int = 0,
) -> Trajectory:
    turns = [
        Turn(
            prompt=[1, 10 + place],
            completion=Completion(tokens=[2], logprobs=[-1.0], versions=[version], stopped=True),
        )
        for place, version in enumerate(versions)
    ]
    return Trajectory(seed=seed, turns=turns, ending=ending, reward=reward, tool_calls=tool_calls)


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


def test_samples_know_their_group_and_the_trajectorys_reward() -> None:
    groups = [
        Group(seed=1, trajectories=[trajectory(1, 1.0, versions=(0, 0)), trajectory(1, 0.0)]),
        Group(seed=2, trajectories=[trajectory(2, 5.0)]),
    ]
    samples = training_samples(groups, normalize_std=False)
    assert [(s.group, s.reward) for s in samples] == [(0, 1.0), (0, 1.0), (0, 0.0), (1, 5.0)]


def test_what_was_cut_off_is_masked_and_stays_in_the_baseline() -> None:
    cut = trajectory(1, 0.0, ending=Ending.TRUNCATED_LENGTH)
    groups = [Group(seed=1, trajectories=[trajectory(1, 1.0), cut, trajectory(1, 0.5)])]
    samples = training_samples(groups, normalize_std=False, overlong=Overlong(handling="mask"))
    # The mean of 1, 0 and 0.5.
    assert [(s.trajectory, s.advantage) for s in samples] == [(0, 0.5), (2, 0.0)]


def test_the_penalty_is_a_part_of_reward_and_advantage() -> None:
    # Two tokens of two cost 1: rewards 1 and 1 - 1.
    groups = [Group(seed=1, trajectories=[trajectory(1, 1.0), trajectory(1, 1.0, versions=(0, 0))])]
    overlong = Overlong(handling="penalty", max_length=2, buffer=1)
    samples = training_samples(groups, normalize_std=False, overlong=overlong)
    assert [(s.reward, s.advantage) for s in samples] == [(1.0, 0.5), (0.0, -0.5), (0.0, -0.5)]


def test_what_was_refused_or_failed_counts_too() -> None:
    groups = [Group(seed=1, trajectories=[trajectory(1, 1.0), trajectory(1, 0.0)])]
    tally = Tally(
        refused=Counter({NO_VARIANCE: 3, "other": 1}),
        endings=Counter({Ending.FAILED_REWARD: 2, Ending.TRUNCATED_TIME: 4}),
        rewards=[1.0, 1.0, 1.0, 1.0, 0.0, 0.0],
    )
    figures = rollout_figures(groups, version=0, tally=tally)
    assert figures["rollout/refused_groups"] == 3.0
    assert figures["reward/mean"] == 0.5
    assert figures["rollout/reward_mean"] == 5 / 8  # 1 of two trained, 4 of six refused
    assert figures["rollout/zero_variance_share"] == 0.75  # 3 of 4
    assert figures["rollout/ending/failed_reward"] == 0.25  # 2 of 8 episodes
    assert figures["rollout/ending/completed"] == 0.25
    assert figures["rollout/ending/truncated_time"] == 0.5
    assert figures["rollout/truncated_share"] == pytest.approx(4 / 6)  # of those that did not fail


def test_groups_have_the_variance_of_the_rewards_that_they_are_trained_with() -> None:
    groups = [Group(seed=1, trajectories=[trajectory(1, 1.0), trajectory(1, 1.0, versions=(0, 0))])]
    overlong = Overlong(handling="penalty", max_length=2, buffer=1)
    assert rollout_figures(groups, version=0)["rollout/zero_variance_share"] == 1.0
    assert rollout_figures(groups, version=0, overlong=overlong)["rollout/zero_variance_share"] == 0.0


def test_figures_by_hand() -> None:
    groups = [
        Group(
            seed=1,
            trajectories=[
                trajectory(1, 1.0, versions=(4, 4, 4), tool_calls=3),
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
    assert rollout_figures(groups, version=4, max_staleness=2) == {
        "reward/mean": -0.125,
        "rollout/reward_mean": -0.125,
        "rollout/trajectories": 4.0,
        "rollout/turns_mean": 2.0,
        "rollout/tool_calls_mean": 0.75,
        "rollout/tokens_mean": 2.0,
        "rollout/groups": 2.0,
        "rollout/refused_groups": 0.0,
        "rollout/zero_variance_share": 0.5,
        "rollout/truncated_share": 0.5,
        "rollout/ending/completed": 0.25,
        "rollout/ending/illegal_answer": 0.25,
        "rollout/ending/truncated_turns": 0.25,
        "rollout/ending/truncated_length": 0.25,
        **{f"rollout/ending/{name}": 0.0 for name in UNSEEN},
        "rollout/staleness/0": 0.5,
        "rollout/staleness/1": 0.5,
        "rollout/staleness/2": 0.0,
    }


def test_what_refused_groups_earned_is_kept() -> None:
    failed = NoTrajectory(absence=Absence.UNSCORED, reason="", ending=Ending.FAILED_REWARD)
    tally = Tally()
    tally.ended([trajectory(1, 1.0), failed, trajectory(1, -0.5)], refused=True)
    tally.ended([trajectory(1, 7.0), failed], refused=False)  # is trained: its group has it
    assert tally.rewards == [1.0, -0.5]
    assert tally.endings == {Ending.COMPLETED: 2, Ending.FAILED_REWARD: 2}
