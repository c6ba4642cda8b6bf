"""Ratios of sequences: their value, their gradient, and that no division into passes changes them."""

import numpy as np
import pytest
import torch

from rl_bridge.algorithms.ratios import sequence_means, sequence_ratios

# Sequence 7: ratios 2 and 0.5 and 8, whose geometric mean is 2. Sequence 3: a ratio of 3.
SEQUENCES = np.array([7, 3, 7, 7])
LOG_RATIOS = np.log(np.array([2.0, 3.0, 0.5, 8.0])).astype(np.float32)


def test_the_geometric_mean_by_hand() -> None:
    means = sequence_means(LOG_RATIOS, SEQUENCES)
    assert np.exp(means).tolist() == pytest.approx([2.0, 3.0, 2.0, 2.0], rel=1e-6)
    assert means.dtype == np.float32


def test_the_value_is_the_sequences_at_every_token() -> None:
    means = torch.from_numpy(sequence_means(LOG_RATIOS, SEQUENCES))
    assert sequence_ratios(torch.tensor([-1.0, -2.0, -3.0, -4.0]), means).tolist() == pytest.approx(
        [2.0, 3.0, 2.0, 2.0], rel=1e-6
    )


def test_the_gradient_is_that_of_the_sequences_ratio() -> None:
    # s = exp((x1 + x2 + x3) / 3) has the gradient s / 3 = 2 / 3 with respect to each: what the mean over the three
    # tokens of s_t gives, one part of it at each token.
    old = torch.tensor([-1.0, -1.0, -1.0])
    logprobs = (old + torch.tensor([2.0, 0.5, 8.0]).log()).requires_grad_()
    torch.exp((logprobs - old).mean()).backward()
    assert logprobs.grad is not None
    direct, logprobs.grad = logprobs.grad.tolist(), None
    assert direct == pytest.approx([2 / 3] * 3, rel=1e-6)
    means = torch.from_numpy(sequence_means((logprobs - old).detach().numpy(), np.array([0, 0, 0])))
    sequence_ratios(logprobs, means).mean().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(direct, rel=1e-6)
