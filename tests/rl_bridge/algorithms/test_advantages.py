"""Advantages, returns and penalties, against values worked out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.algorithms.advantages import (
    group_advantages,
    has_variance,
    masked_advantages,
    overlong_penalty,
)
from rl_bridge.algorithms.returns import generalized_advantages, penalised_rewards, value_loss, whitened

REWARDS = st.lists(st.floats(-10, 10, allow_nan=False, width=32), min_size=2, max_size=16)


def test_group_advantages_with_std() -> None:
    # Mean 0; variance (1 + 0 + 0 + 1) / 4 = 0.5; std 0.7071068; 1 / (0.7071068 + 0.000001) = 1.4142116.
    assert group_advantages([1.0, 0.0, 0.0, -1.0], normalize_std=True) == pytest.approx(
        [1.4142115624, 0.0, 0.0, -1.4142115624], abs=1e-9
    )


def test_std_is_the_populations() -> None:
    # Mean 2, deviations 2 and -2, population std 2 (the sample's would be 2.83): 2 / 2.000001.
    assert group_advantages([4.0, 0.0], normalize_std=True) == pytest.approx(
        [0.9999995, -0.9999995], abs=1e-9
    )


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_that_agrees_has_no_advantage(normalize_std: bool) -> None:
    assert group_advantages([-1.0] * 5, normalize_std=normalize_std) == [0.0] * 5


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one reward"):
        group_advantages([], normalize_std=True)


def test_has_variance() -> None:
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


REWARD = st.none() | st.floats(-10, 10, allow_nan=False, width=32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[float | None], int]:
    size = draw(st.integers(1, 8))
    groups = draw(st.integers(0, 4))
    return draw(st.lists(REWARD, min_size=size * groups, max_size=size * groups)), size


def test_rewards_that_are_unknown_are_left_out() -> None:
    # The scored ones of the first group have the mean 2; a 0 in the place of None would make it 4 / 3.
    masked = masked_advantages([3.0, None, 1.0, 5.0, 5.0, 5.0], 3, normalize_std=False)
    assert masked.advantages == [1.0, 0.0, -1.0, 0.0, 0.0, 0.0]
    assert masked.mask == [True, False, True, True, True, True]


@pytest.mark.parametrize("group", [[None, None, None], [7.0, None, None], [None, None, -7.0]])
def test_fewer_than_two_scored_siblings_give_no_gradient(group: list[float | None]) -> None:
    masked = masked_advantages([*group, 1.0, 0.0, 0.5], 3, normalize_std=False)
    assert masked.advantages == [0.0, 0.0, 0.0, 0.5, -0.5, 0.0]
    assert masked.mask == [False] * 3 + [True] * 3


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


def floats(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.8. One sequence, values 1, 2, 4, reward 8 at the end:
    #   delta_2 = 8 - 4 = 4                        A_2 = 4
    #   delta_1 = 0.5 * 4 - 2 = 0                  A_1 = 0 + 0.4 * 4 = 1.6
    #   delta_0 = 0.5 * 2 - 1 = 0                  A_0 = 0.4 * 1.6 = 0.64
    # Returns A + V: 1.64, 3.6, 8.
    advantages, returns = generalized_advantages(
        floats(0, 0, 8), floats(1, 2, 4), np.array([0, 0, 0]), gamma=0.5, gae_lambda=0.8
    )
    assert advantages.tolist() == pytest.approx([0.64, 1.6, 4.0])
    assert returns.tolist() == pytest.approx([1.64, 3.6, 8.0])


def test_sequences_that_are_mixed_up_do_not_touch() -> None:
    # Sequences 5 and 2 take turns; alone they have the advantages of the tests above.
    advantages, returns = generalized_advantages(
        floats(1, 0, 2, 5), floats(0.5, 1, 0.25, 3), np.array([5, 2, 5, 2]), gamma=1.0, gae_lambda=1.0
    )
    assert advantages.tolist() == pytest.approx([2.5, 4.0, 1.75, 2.0])
    assert returns.tolist() == pytest.approx([3.0, 5.0, 2.0, 5.0])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-2, 2, width=32), st.floats(-2, 2, width=32)), min_size=1, max_size=8),
    st.floats(0.5, 1),
    st.floats(0, 1),
)
def test_gae_is_the_sum_over_deltas(
    steps: list[tuple[float, float]], gamma: float, gae_lambda: float
) -> None:
    """A_t = sum_l (gamma lambda)^l delta_{t+l}, the formula as the paper has it."""
    rewards, values = zip(*steps, strict=True)
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    expected = [
        sum((gamma * gae_lambda) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]
    advantages, _ = generalized_advantages(
        floats(*rewards), floats(*values), np.zeros(len(steps), np.int64), gamma=gamma, gae_lambda=gae_lambda
    )
    assert advantages.tolist() == pytest.approx(expected, abs=1e-4)


def test_whitening() -> None:
    # Mean 2, deviation sqrt(((-1)^2 + 1^2) / 2) = 1.
    assert whitened(floats(1, 3)).tolist() == pytest.approx([-1.0, 1.0])
    assert whitened(floats(4, 4)).tolist() == [0.0, 0.0]


def test_the_divergence_is_paid_where_it_is_caused() -> None:
    assert penalised_rewards(floats(0, 1), floats(0.5, -2), coefficient=0.1).tolist() == pytest.approx(
        [-0.05, 1.2]
    )


@pytest.mark.parametrize(
    ("value", "reward", "clip", "loss", "gradient"),
    [
        # Return 3, old value 1. (2 - 3)^2 / 2.
        (2.0, 3.0, None, 0.5, -1.0),
        # Within the clip: the same.
        (1.1, 3.0, 0.2, 1.805, -1.9),
        # Beyond it on the way to the return: (1.2 - 3)^2 / 2 = 1.62 is more than 0.5, and has no gradient.
        (2.0, 3.0, 0.2, 1.62, 0.0),
        # The same downwards, to a return of 0: 0.8^2 / 2 is more than 0.
        (0.0, 0.0, 0.2, 0.32, 0.0),
        # Beyond it on the way from the return: (0 - 3)^2 / 2 is more than (0.8 - 3)^2 / 2.
        (0.0, 3.0, 0.2, 4.5, -3.0),
    ],
)
def test_value_loss(value: float, reward: float, clip: float | None, loss: float, gradient: float) -> None:
    values = torch.tensor([value], requires_grad=True)
    found = value_loss(values, torch.tensor([reward]), torch.tensor([1.0]), clip=clip)
    found.sum().backward()
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    ("length", "expected"),
    # Up to 16 tokens nothing, then a quarter a token, and no more than 1.
    [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (25, -1.0)],
)
def test_overlong_penalty_falls_linearly(length: int, expected: float) -> None:
    assert overlong_penalty(length, max_length=20, buffer=4) == pytest.approx(expected)
