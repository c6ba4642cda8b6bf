"""Advantages, returns and penalties, against values worked out by hand."""

import numpy as np
import pytest
import torch

from rl_bridge.algorithms.advantages import (
    generalized_advantages,
    group_advantages,
    overlong_penalty,
    value_loss,
    whiten,
)


def test_group_advantages_with_std() -> None:
    # Mean 0; variance (1 + 0 + 0 + 1) / 4 = 0.5; std 0.7071068; 1 / (0.7071068 + 0.000001) = 1.4142116.
    assert group_advantages([1.0, 0.0, 0.0, -1.0], normalize_std=True) == pytest.approx(
        [1.4142115624, 0.0, 0.0, -1.4142115624], abs=1e-9
    )
    with pytest.raises(ValueError, match="at least one reward"):
        group_advantages([], normalize_std=True)


@pytest.mark.parametrize("size", [1e150, 1e200, 1.7e308])
def test_rewards_of_any_finite_size_have_advantages(size: float) -> None:
    # The squares of the first two, and the sum of the last, are beyond a float.
    rewards = [size, size, size, -size]
    assert group_advantages(rewards, normalize_std=True) == pytest.approx([3**-0.5] * 3 + [-(3**0.5)])
    half = 0.5 * size
    assert group_advantages([size, 0.0, size, 0.0], normalize_std=False) == [half, -half, half, -half]


@pytest.mark.parametrize("reward", [0.1, -1e6 - 0.3])
def test_equal_rewards_of_any_size_have_no_advantages(reward: float) -> None:
    assert group_advantages([reward] * 7, normalize_std=True) == [0.0] * 7
    assert group_advantages([reward] * 7, normalize_std=False) == [0.0] * 7


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


def test_whitening() -> None:
    # Mean 2, deviation sqrt(((-1)^2 + 1^2) / 2) = 1.
    assert whiten(floats(1, 3)).tolist() == pytest.approx([-1.0, 1.0])
    assert whiten(floats(4, 4)).tolist() == [0.0, 0.0]


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


def test_overlong_penalty_falls_linearly() -> None:
    found = [overlong_penalty(length, max_length=20, buffer=4) for length in (0, 16, 17, 20, 25)]
    assert found == pytest.approx([0.0, 0.0, -0.25, -1.0, -1.0])
