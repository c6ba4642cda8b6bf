"""What keeps a policy from collapsing, and weights that correct for the engine's own probabilities."""

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
GREATEST_K3 = 10.0
"""Of a token that is less likely than under the reference: reached at x = -2.61."""
LOWEST_LOG_RATIO = -20.0
"""So that what is bounded is finite, and so its gradient a 0 and no NaN."""


def kl_to_reference(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """An estimate of KL(pi || pi_ref) from tokens sampled under pi, with x = log(pi / pi_ref).

    - `k1`: x. Unbiased, often negative. For rewards: in a loss its gradient is 0 in expectation.
    - `k2`: x^2 / 2. Biased, never negative; in a loss its gradient is the divergence's in expectation.
    - `k3`: exp(-x) + x - 1. Unbiased, never negative; what GRPO adds to its loss (arXiv 2402.03300, equation 4). There
      its gradient is in expectation that of KL(pi_ref || pi). Of a token that has become far less likely than
      under the reference it is 10 at most, without a gradient: one such token would outweigh its batch, and beyond
      x = -88 exp(-x) is infinite. verl (`low_var_kl`) and OpenRLHF bound k3 by 10 too, there also where x is large and
      positive; here it grows on with x then, and pulls with a slope of 1, which is what it is for.

    J. Schulman, "Approximating KL Divergence", 2020.

    Args:
        logprobs: Of the tokens under the policy, with gradient, shape [T].
        reference_logprobs: Of the same tokens under the reference, shape [T].
        estimator: One of the above.

    Returns:
        Shape [T].
    """
    x = logprobs - reference_logprobs
    if estimator == "k1":
        return x
    if estimator == "k2":
        return 0.5 * x * x
    x = x.clamp(min=LOWEST_LOG_RATIO)
    k3 = torch.exp(-x) + x - 1.0
    return torch.where(x < 0.0, k3.clamp(max=GREATEST_K3), k3)


def held_then_annealed(progress: float, *, value: float, hold: float, final_factor: float) -> float:
    """A coefficient held for the first part of a run, then lowered linearly.

    Args:
        progress: Where the run stands, in [0, 1].
        value: The coefficient while it is held.
        hold: The share of the run for which it is held, in [0, 1].
        final_factor: What remains of it at progress 1, as a share of `value`.
    """
    if progress <= hold or hold >= 1.0:
        return value
    descent = min(1.0, (progress - hold) / (1.0 - hold))
    return value * (1.0 - descent * (1.0 - final_factor))


Correction = Literal["none", "truncated", "icepop", "decoupled"]


def correction_weights(
    log_ratio: Tensor, correction: Correction, *, cap: float, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """The weight of each token, and whether a bound changed it, each of shape [T] and without gradient.

    - `none`: 1.
    - `decoupled`: pi_prox / mu, of decoupled PPO, arXiv 2505.24298; the clip is on pi_theta / pi_prox.
    - `truncated`: min(pi_old / mu, cap), truncated importance sampling (Ionides, 2008), as it is used against engine
      mismatch.
    - `icepop`: pi_old / mu within [low, high], and 0 outside: IcePop, arXiv 2510.18855, whose range is [0.5, 5].

    Args:
        log_ratio: log(pi_old / mu), shape [T].
        correction: One of the above.
        cap: The largest weight of `truncated`.
        low: The smallest that counts for `icepop`.
        high: The largest.
    """
    ratio = weights = torch.exp(log_ratio.detach())
    if correction == "none":
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    if correction == "truncated":
        weights = ratio.clamp(max=cap)
    elif correction == "icepop":
        weights = torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
    return weights, weights != ratio
