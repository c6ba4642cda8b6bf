"""Rewards that are not known are left out: of the baseline, of the deviation, of the loss."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.algorithms.advantages import group_advantages, masked_advantages

REWARD = st.none() | st.floats(-10, 10, allow_nan=False, width=32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[float | None], int]:
    size = draw(st.integers(1, 8))
    groups = draw(st.integers(0, 4))
    return draw(st.lists(REWARD, min_size=size * groups, max_size=size * groups)), size


def test_by_hand() -> None:
    # The scored ones of the first group have the mean 2; a 0 in the place of None would make it 4 / 3.
    masked = masked_advantages([3.0, None, 1.0, 5.0, 5.0, 5.0], 3, normalize_std=False)
    assert masked.advantages == [1.0, 0.0, -1.0, 0.0, 0.0, 0.0]
    assert masked.mask == [True, False, True, True, True, True]


def test_with_std() -> None:
    masked = masked_advantages([4.0, None, 0.0], 3, normalize_std=True)
    assert masked.advantages == pytest.approx([0.9999995, 0.0, -0.9999995], abs=1e-9)


@pytest.mark.parametrize("group", [[None, None, None], [7.0, None, None], [None, None, -7.0]])
def test_fewer_than_two_scored_siblings_give_no_gradient(group: list[float | None]) -> None:
    masked = masked_advantages([*group, 1.0, 0.0, 0.5], 3, normalize_std=False)
    assert masked.advantages == [0.0, 0.0, 0.0, 0.5, -0.5, 0.0]
    assert masked.mask == [False] * 3 + [True] * 3


def test_no_reward_is_no_advantage() -> None:
    masked = masked_advantages([], 4, normalize_std=True)
    assert (masked.advantages, masked.mask) == ([], [])


@pytest.mark.parametrize("size", [0, -1, 2])
def test_broken_groups_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"whole groups of .*got 3 rewards"):
        masked_advantages([1.0, None, 0.0], size, normalize_std=False)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused_by_its_place(reward: float) -> None:
    with pytest.raises(ValueError, match=rf"finite rewards.*got {reward} at 3"):
        masked_advantages([0.0, 1.0, None, reward], 2, normalize_std=False)


@given(batches(), st.booleans())
def test_it_is_the_unmasked_function_of_the_scored_siblings(
    batch: tuple[list[float | None], int], normalize_std: bool
) -> None:
    rewards, size = batch
    masked = masked_advantages(rewards, size, normalize_std=normalize_std)
    assert len(masked.advantages) == len(masked.mask) == len(rewards)
    for first in range(0, len(rewards), size):
        places = range(first, first + size)
        scored = [place for place in places if rewards[place] is not None]
        used = [place for place in places if masked.mask[place]]
        assert used == (scored if len(scored) > 1 else [])
        assert all(masked.advantages[place] == 0.0 for place in places if place not in used)
        if used:
            values = [reward for place in used if (reward := rewards[place]) is not None]
            expected = group_advantages(values, normalize_std=normalize_std)
            assert [masked.advantages[place] for place in used] == expected


@given(batches(), st.data())
def test_what_stands_elsewhere_changes_nothing(
    batch: tuple[list[float | None], int], data: st.DataObject
) -> None:
    """One more failure changes the siblings of its group alone, and a reward that is not there changes nobody."""
    rewards, size = batch
    if not rewards:
        return
    place = data.draw(st.integers(0, len(rewards) - 1))
    before = masked_advantages(rewards, size, normalize_std=False)
    after = masked_advantages([*rewards[:place], None, *rewards[place + 1 :]], size, normalize_std=False)
    first = place - place % size
    for other in range(len(rewards)):
        if not first <= other < first + size:
            assert (before.advantages[other], before.mask[other]) == (
                after.advantages[other],
                after.mask[other],
            )
    if rewards[place] is None:
        assert after == before
