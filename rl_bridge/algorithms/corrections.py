"""Weights for tokens that the engine sampled with other probabilities than the trainer finds.

mu is the probability that a token was really sampled with, pi_old what the trainer gave it before its first update: the
same policy computed otherwise, or a newer one. Each function takes log(pi_old / mu).
"""

from typing import Literal

import torch
from torch import Tensor

Correction = Literal["none", "truncated", "icepop", "decoupled"]


def decoupled_weights(log_ratio: Tensor) -> Tensor:
    """pi_prox / mu, the weight of decoupled PPO, arXiv 2505.24298; the clip is on pi_theta / pi_prox.

    Args:
        log_ratio: log(pi_prox / mu), shape [T].
    """
    return torch.exp(log_ratio)


def truncated_weights(log_ratio: Tensor, *, cap: float) -> Tensor:
    """min(pi_old / mu, C): truncated importance sampling (Ionides, 2008), as it is used against engine mismatch.

    Args:
        log_ratio: log(pi_old / mu), shape [T].
        cap: C.
    """
    return torch.exp(log_ratio).clamp(max=cap)


def icepop_weights(log_ratio: Tensor, *, low: float, high: float) -> Tensor:
    """pi_old / mu within [low, high], and 0 outside: IcePop, arXiv 2510.18855, whose range is [0.5, 5].

    Args:
        log_ratio: log(pi_old / mu), shape [T].
        low: The smallest weight that counts.
        high: The largest.
    """
    ratio = torch.exp(log_ratio)
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def correction_weights(
    log_ratio: Tensor, correction: Correction, *, cap: float, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """The weight of each token, and whether a bound changed it, each of shape [T] and without gradient.

    Args:
        log_ratio: log(pi_old / mu), shape [T].
        correction: Which of the above; "none" gives ones.
        cap: For `truncated_weights`.
        low: For `icepop_weights`.
        high: Likewise.
    """
    log_ratio = log_ratio.detach()
    if correction == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    plain = decoupled_weights(log_ratio)
    if correction == "decoupled":
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    weights = (
        truncated_weights(log_ratio, cap=cap)
        if correction == "truncated"
        else icepop_weights(log_ratio, low=low, high=high)
    )
    return weights, weights != plain
