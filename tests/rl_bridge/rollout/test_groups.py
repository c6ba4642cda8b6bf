"""Seeds into deals, trajectories into groups, groups into samples and figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.rollout.groups import (
    into_groups,
    rollout_figures,
    siblings,
    training_samples,
    training_seeds,
)
from rl_bridge.rollout.seeds import TRAINING_SEEDS, held_out_seeds
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


RUN, ITERATION = st.integers(0, 2**31 - 1), st.integers(0, 10_000)


@given(RUN, ITERATION, st.integers(0, 2**40), st.integers(1, 64))
def test_held_out_seeds_are_never_trained_on(run: int, iteration: int, first: int, count: int) -> None:
    training, held_out = training_seeds(run, iteration, count), held_out_seeds(first, count)
    assert len(training) == len(held_out) == count
    assert 0 <= min(training) <= max(training) < TRAINING_SEEDS <= min(held_out)


def test_held_out_seeds_go_on_where_the_last_part_ended() -> None:
    assert [*held_out_seeds(0, 5), *held_out_seeds(5, 3)] == [*held_out_seeds(0, 8)]


@given(RUN, ITERATION, st.integers(1, 32), st.integers(0, 32))
def test_training_seeds_depend_on_run_and_iteration_alone(
    run: int, iteration: int, count: int, more: int
) -> None:
    seeds = training_seeds(run, iteration, count)
    assert training_seeds(run, iteration, count + more)[:count] == seeds


def test_other_iterations_and_other_runs_have_other_deals() -> None:
    deals = [tuple(training_seeds(run, iteration, 4)) for run in range(4) for iteration in range(50)]
    assert len(set(deals)) == len(deals)
    # A pair, not a sum: the next run does not repeat this one's next iteration.
    assert training_seeds(0, 1, 4) != training_seeds(1, 0, 4)


def test_siblings_stand_together() -> None:
    assert siblings([5, 6], 3) == [5, 5, 5, 6, 6, 6]


def test_groups_come_back_together_without_what_was_dropped() -> None:
    played = [trajectory(5), None, trajectory(5), trajectory(6), None, None, None, None, None]
    groups = into_groups(played, 3)
    # Of the second deal one is left, which has nobody to be compared with; of the third none.
    assert [(group.seed, len(group.trajectories)) for group in groups] == [(5, 2)]


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
