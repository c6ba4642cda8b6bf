"""Which trajectories and groups are trained, by hand."""

from dataclasses import replace

import pytest

from rl_bridge.rollout.filters import ALL_TRUNCATED, NO_VARIANCE, GroupFilter, Overlong
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn

MASK = Overlong(handling="mask", max_length=20, buffer=4)
PENALTY = Overlong(handling="penalty", max_length=20, buffer=4)


def trajectory(
    reward: float, *, lengths: tuple[int, ...] = (1,), ending: Ending = Ending.COMPLETED
) -> Trajectory:
    turns = [
        Turn(
            prompt=[1] * 100,
            completion=Completion(
                tokens=[2] * length, logprobs=[-1.0] * length, versions=[0] * length, stopped=True
            ),
        )
        for length in lengths
    ]
    return Trajectory(seed=0, turns=turns, ending=ending, reward=reward)


CUT_OFF = trajectory(0.5, ending=Ending.TRUNCATED_LENGTH)


def group(*trajectories: Trajectory) -> Group:
    return Group(seed=0, trajectories=list(trajectories))


def test_the_penalty_counts_what_the_policy_said() -> None:
    # 16 tokens are free, of the last 4 each costs a quarter; what the policy read costs nothing.
    assert PENALTY.reward(trajectory(1.0, lengths=(10, 6))) == 1.0
    assert PENALTY.reward(trajectory(1.0, lengths=(10, 7))) == 0.75
    assert PENALTY.reward(trajectory(-1.0, lengths=(20,))) == -2.0
    assert MASK.reward(trajectory(1.0, lengths=(20,))) == 1.0


@pytest.mark.parametrize("ending", Ending)
def test_what_a_limit_of_ours_ended_is_masked(ending: Ending) -> None:
    one = trajectory(1.0, ending=ending)
    assert MASK.masks(one) == ending.value.startswith("truncated")
    assert not PENALTY.masks(one)


DYNAMIC = GroupFilter(dynamic=True, refills=1000)


def test_everything_gets_through_without_dynamic_sampling() -> None:
    assert GroupFilter().refusal(group(trajectory(1.0), trajectory(1.0)), first=0) is None
    assert GroupFilter().refusal(group(CUT_OFF, CUT_OFF), first=0) is None


def test_dynamic_sampling_refuses_groups_that_agree() -> None:
    assert DYNAMIC.refusal(group(trajectory(1.0), trajectory(1.0)), first=0) == NO_VARIANCE
    assert DYNAMIC.refusal(group(trajectory(1.0), trajectory(0.5)), first=0) is None


def test_it_looks_at_the_rewards_that_are_trained() -> None:
    long = trajectory(1.0, lengths=(20,))
    assert replace(DYNAMIC, overlong=PENALTY).refusal(group(trajectory(1.0), long), first=0) is None


@pytest.mark.parametrize(
    ("number", "first", "refused"),
    [(0, 0, True), (5, 0, True), (6, 0, False), (17, 12, True), (18, 12, False), (11, 12, True)],
)
def test_refills_are_limited(number: int, first: int, refused: bool) -> None:
    agreeing = Group(id=number, seed=0, trajectories=[trajectory(1.0), trajectory(1.0)])
    few = GroupFilter(dynamic=True, refills=6)
    assert few.refusal(agreeing, first=first) == (NO_VARIANCE if refused else None)


def test_a_group_with_nobody_to_train_never_gets_through() -> None:
    masking = GroupFilter(overlong=MASK)
    assert masking.refusal(group(CUT_OFF, CUT_OFF), first=0) == ALL_TRUNCATED
    assert masking.refusal(group(CUT_OFF, trajectory(0.0)), first=0) is None
