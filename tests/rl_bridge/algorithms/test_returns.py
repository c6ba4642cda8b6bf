"""GAE, whitening, the divergence in the reward and the value loss, worked out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.algorithms.returns import generalized_advantages, penalised_rewards, whitened
from rl_bridge.algorithms.value_loss import value_loss


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


def test_rewards_on_the_way_count() -> None:
    # gamma 1, lambda 1: the sum of the rewards to come less the value. 1 + 2 - 0.5 and 2 - 0.25.
    advantages, returns = generalized_advantages(
        floats(1, 2), floats(0.5, 0.25), np.array([9, 9]), gamma=1.0, gae_lambda=1.0
    )
    assert advantages.tolist() == pytest.approx([2.5, 1.75])
    assert returns.tolist() == pytest.approx([3.0, 2.0])


def test_lambda_of_zero_looks_one_token_ahead() -> None:
    # 0 + 3 - 1 and 5 - 3.
    advantages, _ = generalized_advantages(
        floats(0, 5), floats(1, 3), np.array([0, 0]), gamma=1.0, gae_lambda=0.0
    )
    assert advantages.tolist() == pytest.approx([2.0, 2.0])


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
def test_it_is_the_sum_over_deltas(steps: list[tuple[float, float]], gamma: float, gae_lambda: float) -> None:
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
    ("value", "clip", "loss", "gradient"),
    [
        # Return 3, old value 1. (2 - 3)^2 / 2.
        (2.0, None, 0.5, -1.0),
        # Within the clip: the same.
        (1.1, 0.2, 1.805, -1.9),
        # Beyond it on the way to the return: (1.2 - 3)^2 / 2 = 1.62 is more than 0.5, and has no gradient.
        (2.0, 0.2, 1.62, 0.0),
        # Beyond it on the way from the return: (0 - 3)^2 / 2 is more than (0.8 - 3)^2 / 2.
        (0.0, 0.2, 4.5, -3.0),
    ],
)
def test_value_loss(value: float, clip: float | None, loss: float, gradient: float) -> None:
    values = torch.tensor([value], requires_grad=True)
    found = value_loss(values, torch.tensor([3.0]), torch.tensor([1.0]), clip=clip)
    found.sum().backward()
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient, abs=1e-6)
