"""The clipped policy-gradient objective, token by token."""

from typing import NamedTuple

import torch
from torch import Tensor


class Surrogate(NamedTuple):
    """What `clipped_surrogate` gives, each of shape [T].

    Attributes:
        loss: The loss of each token, to be minimised.
        ratio: pi_theta / pi_old of each token.
        clipped_low: True where the lower bound took the gradient away.
        clipped_high: True where the upper bound did.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), with rho = exp(logprobs - old_logprobs).

    PPO, arXiv 1707.06347, equation 7; different bounds below and above ("clip-higher") are DAPO's,
    arXiv 2503.14476, section 3.1.

    Args:
        logprobs: Of the tokens under the policy being trained, with gradient, shape [T].
        old_logprobs: Of the same tokens when they were sampled, shape [T].
        advantages: Shape [T].
        clip_low: How far below 1 the ratio may fall before its gradient stops.
        clip_high: How far above 1 it may rise.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return Surrogate(
        loss=loss,
        ratio=ratio,
        clipped_low=(ratio < 1.0 - clip_low) & (advantages < 0),
        clipped_high=(ratio > 1.0 + clip_high) & (advantages > 0),
    )
