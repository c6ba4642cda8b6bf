"""Advantages within a group, against values worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.algorithms.advantages import group_advantages, has_variance

REWARDS = st.lists(st.floats(-10, 10, allow_nan=False, width=32), min_size=2, max_size=16)


def test_with_std() -> None:
    # Mean 0; variance (1 + 0 + 0 + 1) / 4 = 0.5; std 0.7071068; 1 / (0.7071068 + 0.000001) = 1.4142116.
    assert group_advantages([1.0, 0.0, 0.0, -1.0], normalize_std=True) == pytest.approx(
        [1.4142115624, 0.0, 0.0, -1.4142115624], abs=1e-9
    )


def test_std_is_the_populations() -> None:
    # Mean 2, deviations 2 and -2, population std 2 (the sample's would be 2.83): 2 / 2.000001.
    assert group_advantages([4.0, 0.0], normalize_std=True) == pytest.approx(
        [0.9999995, -0.9999995], abs=1e-9
    )


def test_without_std() -> None:
    # Mean 2.
    assert group_advantages([3.0, 1.0, 1.0, 3.0], normalize_std=False) == [1.0, -1.0, -1.0, 1.0]
    # Mean 0.5: the scale of the rewards stays.
    assert group_advantages([1.5, 0.0, 0.0, 0.5], normalize_std=False) == [1.0, -0.5, -0.5, 0.0]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_that_agrees_has_no_advantage(normalize_std: bool) -> None:
    assert group_advantages([-1.0] * 5, normalize_std=normalize_std) == [0.0] * 5


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one reward"):
        group_advantages([], normalize_std=True)


def test_variance() -> None:
    assert has_variance([0.0, 0.0, 1.0])
    assert not has_variance([1.0, 1.0])
    assert not has_variance([])


@given(REWARDS, st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[float], normalize_std: bool) -> None:
    advantages = group_advantages(rewards, normalize_std=normalize_std)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    for first in range(len(rewards)):
        for second in range(len(rewards)):
            if rewards[first] >= rewards[second]:
                assert advantages[first] >= advantages[second]


@given(REWARDS, st.floats(0.5, 100))
def test_with_std_the_scale_of_rewards_does_not_matter(rewards: list[float], scale: float) -> None:
    if max(rewards) - min(rewards) < 0.5:
        return
    once = group_advantages(rewards, normalize_std=True)
    scaled = group_advantages([scale * reward for reward in rewards], normalize_std=True)
    assert scaled == pytest.approx(once, abs=1e-4)
