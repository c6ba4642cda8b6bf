"""Groups: filters, samples, metrics; and runs whose actions are all refused."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.algorithms.advantages import NO_VARIANCE, without_variance
from rl_bridge.rollout.assignment import TRAINING_SEEDS, held_out_seeds, sampling_seed, task_seed
from rl_bridge.rollout.groups import (
    ALL_TRUNCATED,
    TOO_FEW,
    EpisodeCounts,
    GroupFilter,
    OverlongHandling,
    Tally,
    is_untrainable,
    rollout_metrics,
    training_samples,
)
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn


def trajectory(
    seed: int,
    reward: float = 0.0,
    *,
    ending: Ending = Ending.COMPLETED,
    versions: tuple[int, ...] = (0,),
    length: int = 1,
    tool_calls: int = 0,
) -> Trajectory:
    """An answer of each of the versions to a prompt of its own, of `length` tokens."""
    turns = [
        Turn(
            prompt=[1] * 100 + [10 + place],
            completion=Completion(
                tokens=[2] * length, logprobs=[-1.0] * length, versions=[version] * length, stopped=True
            ),
        )
        for place, version in enumerate(versions)
    ]
    return Trajectory(seed=seed, turns=turns, ending=ending, reward=reward, tool_calls=tool_calls)


def group(*trajectories: Trajectory) -> Group:
    return Group(seed=0, trajectories=list(trajectories))


MASK = OverlongHandling(handling="mask", max_length=20, buffer=4)
PENALTY = OverlongHandling(handling="penalty", max_length=20, buffer=4)


def test_samples_carry_the_advantage_within_their_own_group() -> None:
    groups = [
        group(trajectory(1, 1.0), trajectory(1, 0.0)),
        group(trajectory(2, 5.0, versions=(0, 0)), trajectory(2, 7.0)),
    ]
    samples = training_samples(groups, normalize_std=False)
    # Means 0.5 and 6. The first of the second group has two rows, which share its number and advantage.
    assert [(s.group, s.trajectory, s.reward, s.advantage) for s in samples] == [
        (0, 0, 1.0, 0.5),
        (0, 1, 0.0, -0.5),
        (1, 2, 5.0, -1.0),
        (1, 2, 5.0, -1.0),
        (1, 3, 7.0, 1.0),
    ]
    last = training_samples(
        groups,
        normalize_std=False,
        advantage_function=lambda rewards, **_: [0.0] * (len(rewards) - 1) + [9.0],
    )
    assert {sample.advantage for sample in last} == {0.0, 9.0}
    normalised = training_samples(groups, normalize_std=True)
    assert [s.advantage for s in normalised] == pytest.approx([1, -1, -1, -1, 1], abs=1e-5)


def test_truncated_answer_is_masked_and_stays_in_the_baseline() -> None:
    cut = trajectory(1, 0.0, ending=Ending.TRUNCATED_LENGTH)
    groups = [group(trajectory(1, 1.0), cut, trajectory(1, 0.5))]
    samples = training_samples(groups, normalize_std=False, overlong=MASK)
    # The mean of 1, 0 and 0.5.
    assert [(s.trajectory, s.advantage) for s in samples] == [(0, 0.5), (2, 0.0)]


def test_the_penalty_is_a_part_of_reward_and_advantage() -> None:
    # Of twenty tokens the last four cost 1.
    groups = [group(trajectory(1, 1.0), trajectory(1, 1.0, versions=(0, 0), length=10))]
    samples = training_samples(groups, normalize_std=False, overlong=PENALTY)
    assert [(s.reward, s.advantage) for s in samples] == [(1.0, 0.5), (0.0, -0.5), (0.0, -0.5)]


def test_figures_by_hand() -> None:
    groups = [
        group(
            trajectory(1, 1.0, versions=(4, 4, 4), tool_calls=3),
            trajectory(1, -1.5, ending=Ending.ILLEGAL, versions=(4,)),
        ),
        group(
            trajectory(2, 0.0, ending=Ending.TRUNCATED_TURNS, versions=(3, 4)),
            trajectory(2, 0.0, ending=Ending.TRUNCATED_LENGTH, versions=(4, 4)),
        ),
    ]
    groups[0].trajectories[0].scores = {"legal": 1.0, "style": 0.5}
    groups[1].trajectories[0].scores = {"legal": 0.5}
    assert rollout_metrics(groups, version=4, max_staleness=2) == {
        **{f"rollout/ending/{ending.value}": 0.0 for ending in Ending},
        "rollout/rubric/legal_mean": 0.75,
        "rollout/rubric/style_mean": 0.5,
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
        "rollout/staleness/0": 0.5,
        "rollout/staleness/1": 0.5,
        "rollout/staleness/2": 0.0,
    }


REFUSED = trajectory(1, ending=Ending.REFUSED_ACTION)


@pytest.mark.parametrize(
    "taken",
    [
        trajectory(1),
        trajectory(1, ending=Ending.ILLEGAL, versions=(0, 0)),
        trajectory(1, ending=Ending.REFUSED_ACTION, tool_calls=1),
    ],
)
def test_run_whose_environment_took_an_action_once_does_not_end_by_refusals(taken: Trajectory) -> None:
    counts = EpisodeCounts()
    counts.add_outcomes([REFUSED, taken, *[REFUSED] * 100])
    counts.require_understood(4)
    assert counts.refused in (101, 102)
    resumed = EpisodeCounts(**counts.state())
    resumed.add_outcomes([REFUSED] * 100)
    resumed.require_understood(4)


def test_overlong_penalty_counts_tokens_of_the_policy_only() -> None:
    # 16 tokens are free, of the last 4 each costs a quarter; what the policy read costs nothing.
    assert PENALTY.shaped_reward(trajectory(0, 1.0, versions=(0, 0), length=8)) == 1.0
    assert PENALTY.shaped_reward(trajectory(0, 1.0, length=17)) == 0.75
    assert PENALTY.shaped_reward(trajectory(0, -1.0, length=20)) == -2.0
    assert MASK.shaped_reward(trajectory(0, 1.0, length=20)) == 1.0


def test_truncated_endings_are_masked() -> None:
    for ending in Ending:
        one = trajectory(0, 1.0, ending=ending)
        assert MASK.masks(one) == ending.value.startswith("truncated")
        assert not PENALTY.masks(one)


DYNAMIC = GroupFilter(function=without_variance, refills=1000)


def test_dynamic_sampling_refuses_groups_whose_rewards_agree() -> None:
    one, other = trajectory(0, 1.0), trajectory(0, 0.5)
    assert GroupFilter().refusal(group(one, one), first=0) is None
    assert DYNAMIC.refusal(group(one, one), first=0) == NO_VARIANCE
    assert DYNAMIC.refusal(group(one, other), first=0) is None


def test_rewards_are_compared_within_a_seat() -> None:
    def table(first: float) -> list[Trajectory]:
        return [replace(trajectory(0, first), seat="first"), replace(trajectory(0, -first), seat="second")]

    # What one seat wins the other loses, always: rewards differ, and nothing is to be learnt.
    decided, open_game = group(*table(1.0), *table(1.0)), group(*table(1.0), *table(-2.0))
    assert [DYNAMIC.refusal(each, first=0) for each in (decided, open_game)] == [NO_VARIANCE, None]
    metrics = rollout_metrics([decided, open_game], version=0)
    assert metrics["rollout/zero_variance_share"] == 0.5
    assert (metrics["reward/seat/first_mean"], metrics["reward/seat/second_mean"]) == (0.25, -0.25)


def test_a_length_penalty_does_not_make_equal_answers_differ() -> None:
    """Eight wrong answers, one of them long: dropped."""
    wrong = group(*[trajectory(0)] * 7, trajectory(0, length=20))
    solved = group(*[trajectory(0, 1.0)] * 7, trajectory(0, 1.0, length=20))
    dapo = replace(DYNAMIC, overlong=PENALTY)
    assert [dapo.refusal(each, first=0) for each in (wrong, solved)] == [NO_VARIANCE, NO_VARIANCE]
    # A long right answer, whose shaped reward is that of the short wrong one: there is something to learn.
    differing = group(trajectory(0, 1.0, length=20), trajectory(0, 0.0))
    assert dapo.refusal(differing, first=0) is None
    seen: list[object] = []
    replace(dapo, function=lambda _, rewards: seen.append(rewards)).refusal(differing, first=0)
    assert seen == [[1.0, 0.0]]


def test_filtered_groups_do_not_count_as_lost() -> None:
    reasons = {ALL_TRUNCATED: 1, f"{TOO_FEW}: 1 dropped": 2, NO_VARIANCE: 4, "nobody solved it": 8}
    assert [reason for reason in reasons if is_untrainable(reason)] == list(reasons)[:2]
    trained = [group(trajectory(0, 1.0), trajectory(0, 0.0))]
    found = rollout_metrics(trained, version=0, tally=Tally(refused=Counter(reasons)))
    assert found["rollout/refused_groups"] == 12
    assert found["rollout/zero_variance_share"] == 4 / 13  # of all, those whose rewards agreed


RUN, NUMBER = st.integers(0, 2**31 - 1), st.integers(0, 2**40)


@given(RUN, NUMBER, NUMBER, st.integers(1, 64))
def test_seeds_lie_in_their_ranges(run: int, group: int, first: int, count: int) -> None:
    """Held-out seeds are never trained on, and go on where the last part ended; engines take those of completions."""
    held_out = held_out_seeds(first, count)
    assert len(held_out) == count
    assert [*held_out, *held_out_seeds(first + count, 3)] == [*held_out_seeds(first, count + 3)]
    assert 0 <= task_seed(run, group) < TRAINING_SEEDS <= min(held_out)
    assert 0 <= sampling_seed(run, group, count, first % 1000) < 2**32
