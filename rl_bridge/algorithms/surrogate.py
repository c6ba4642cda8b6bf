"""The policy-gradient objectives, token by token, from how much likelier a token has become."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Surrogate(NamedTuple):
    """What an objective gives, each of shape [T].

    Attributes:
        loss: The loss of each token, to be minimised.
        clipped_low: True where the lower bound took the gradient away, or bounded its weight.
        clipped_high: True where the upper bound did.
        dual_clipped: True where the bound for bad tokens took the gradient away.
    """

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Surrogate:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), and no more than -c A where A < 0.

    PPO, arXiv 1707.06347, equation 7; different bounds below and above ("clip-higher") are DAPO's, arXiv 2503.14476,
    section 3.1; the bound c on bad tokens that have become likely is the dual clip of arXiv 1912.09729.

    Args:
        ratio: rho, with gradient, shape [T].
        advantages: Shape [T].
        clip_low: How far below 1 the ratio may fall before its gradient stops.
        clip_high: How far above 1 it may rise.
        dual_clip: c, above 1; None for no such bound.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    bounded = torch.zeros_like(advantages, dtype=torch.bool)
    if dual_clip is not None:
        most = -dual_clip * advantages
        bounded = (advantages < 0) & (loss > most)
        loss = torch.where(bounded, most, loss)
    return Surrogate(
        loss=loss,
        clipped_low=(ratio < 1.0 - clip_low) & (advantages < 0),
        clipped_high=(ratio > 1.0 + clip_high) & (advantages > 0),
        dual_clipped=bounded,
    )


def cispo(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """CISPO: -stop(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi, arXiv 2506.13585, equations 4 and 5.

    The weight is bounded and not the update: no token loses its gradient. What is told as clipped are tokens with
    an advantage whose weight is at a bound.

    Args:
        logprobs: Under the policy being trained, with gradient, shape [T].
        ratio: rho, shape [T].
        advantages: Shape [T].
        clip_low: How far below 1 the weight may fall; 1 is no bound.
        clip_high: How far above 1 it may rise.
    """
    ratio = ratio.detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    counts = advantages != 0
    return Surrogate(
        loss=-weight * advantages * logprobs,
        clipped_low=(ratio < 1.0 - clip_low) & counts,
        clipped_high=(ratio > 1.0 + clip_high) & counts,
        dual_clipped=torch.zeros_like(counts),
    )


def reinforce(logprobs: Tensor, advantages: Tensor) -> Surrogate:
    """-A log pi: REINFORCE (Williams, 1992); with A = 1 the loss of supervised fine-tuning.

    Args:
        logprobs: Under the policy being trained, with gradient, shape [T].
        advantages: Shape [T].
    """
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(loss=-advantages * logprobs, clipped_low=never, clipped_high=never, dual_clipped=never)


def sequence_means(values: NDArray[np.floating[Any]], sequences: NDArray[np.int64]) -> NDArray[np.float32]:
    """The mean over its own sequence, at each token.

    Of log-ratios it is the logarithm of GSPO's sequence ratio s = (pi(y) / pi_old(y))^(1 / |y|), arXiv 2507.18071,
    equation 7: the geometric mean of the token ratios.

    Args:
        values: Shape [T].
        sequences: Which sequence (trajectory) each token belongs to, shape [T].

    Returns:
        Shape [T].
    """
    _, index, counts = np.unique(sequences, return_inverse=True, return_counts=True)
    sums = np.bincount(index, weights=values, minlength=len(counts))
    means: NDArray[np.float32] = (sums / counts)[index].astype(np.float32)
    return means


def sequence_ratios(logprobs: Tensor, sequence_log_ratios: Tensor) -> Tensor:
    """The sequence's ratio at each of its tokens, with the sequence's gradient once it is summed over the tokens.

    stop(s) pi / stop(pi): GSPO-token, arXiv 2507.18071, equation 14, whose value and gradient are those of the sequence
    ratio where the tokens share an advantage. So tokens of one sequence may be in different passes, on different ranks.

    Args:
        logprobs: Under the policy being trained, with gradient, shape [T].
        sequence_log_ratios: From `sequence_means`, under the same weights, shape [T].
    """
    return torch.exp(sequence_log_ratios + logprobs - logprobs.detach())
