"""The loss of each token and its parts: objectives, KL, entropy, corrections; and the aggregation over tokens."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_bridge.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""Bound of the logarithm of every probability ratio before it is raised, as in verl.

From 88.7 on exp(x) is infinite in float32, and infinity times an advantage or a gradient of 0 is NaN. exp(20) is far
outside of any clip range, so no clipped loss changes; what is beyond has no gradient.
"""


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(x), with x bounded to plus or minus `MAX_LOG_RATIO`; shape [T]. A log-ratio of NaN is not hidden."""
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


class Surrogate(NamedTuple):
    """Result of an objective, each of shape [T].

    Attributes:
        loss: The loss of each token, to be minimised.
        clipped_low: True where the lower bound removed the gradient, or bounded its weight.
        clipped_high: True where the upper bound did.
        dual_clipped: True where the dual clip, for tokens with a negative advantage, removed the gradient.
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
        clip_high: How far above 1 it may rise before that.
        dual_clip: c, above 1; None for no dual clip.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    is_bounded = torch.zeros_like(advantages, dtype=torch.bool)
    if dual_clip is not None:
        upper_bound = -dual_clip * advantages
        is_bounded = (advantages < 0) & (loss > upper_bound)
        loss = torch.where(is_bounded, upper_bound, loss)
    return Surrogate(
        loss=loss,
        clipped_low=(ratio < 1.0 - clip_low) & (advantages < 0),
        clipped_high=(ratio > 1.0 + clip_high) & (advantages > 0),
        dual_clipped=is_bounded,
    )


def cispo(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """CISPO: -stop(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi, arXiv 2506.13585, equations 4 and 5; shape [T].

    The weight is bounded, not the update: no token loses its gradient. Tokens with a nonzero advantage whose weight is
    at a bound count as clipped; a `clip_low` of 1 is no bound.
    """
    ratio = ratio.detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_nonzero = advantages != 0
    return Surrogate(
        loss=-weight * advantages * logprobs,
        clipped_low=(ratio < 1.0 - clip_low) & is_nonzero,
        clipped_high=(ratio > 1.0 + clip_high) & is_nonzero,
        dual_clipped=torch.zeros_like(is_nonzero),
    )


def reinforce(logprobs: Tensor, advantages: Tensor) -> Surrogate:
    """-A log pi, each of shape [T]: REINFORCE (Williams, 1992); with A = 1 the loss of supervised fine-tuning."""
    not_clipped = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(
        loss=-advantages * logprobs,
        clipped_low=not_clipped,
        clipped_high=not_clipped,
        dual_clipped=not_clipped,
    )


def sequence_means(values: NDArray[np.floating[Any]], sequences: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return for each token the mean over its sequence (trajectory), shape [T].

    For log-ratios that is the logarithm of GSPO's sequence ratio s = (pi(y) / pi_old(y))^(1 / |y|), arXiv 2507.18071,
    equation 7: the geometric mean of the token ratios.
    """
    _, index, counts = np.unique(sequences, return_inverse=True, return_counts=True)
    sums = np.bincount(index, weights=values, minlength=len(counts))
    means: NDArray[np.float32] = (sums / counts)[index].astype(np.float32)
    return means


def find_rejected(
    log_ratios: NDArray[np.floating[Any]], sequences: NDArray[np.int64], bound: float
) -> NDArray[np.bool_]:
    """Return for each token whether its sequence (trajectory) is too far from what the engine sampled, shape [T].

    That is if the mean of its log-ratios log(pi_old / mu), the logarithm of the geometric mean of the ratios, is not
    within [-bound, bound]: masked importance sampling of sequences (J. Liu, Y. Li et al., "When Speed Kills Stability:
    Demystifying RL Collapse from the Training-Inference Mismatch", 2025), with the geometric mean, as verl and slime
    have it, in place of the product, which would reject long sequences for their length alone.
    """
    return np.abs(sequence_means(log_ratios, sequences)) > bound


def sequence_ratios(logprobs: Tensor, sequence_log_ratios: Tensor) -> Tensor:
    """Return for each token its sequence's ratio, shape [T]; summed over tokens, it has the sequence's gradient.

    stop(s) pi / stop(pi): GSPO-token, arXiv 2507.18071, equation 14, whose value and gradient are the sequence ratio's
    if the tokens share an advantage. So the tokens of a sequence may be in different passes, on different ranks. The
    sequence log-ratios are those of `sequence_means`, under the same weights.
    """
    return bounded_ratio(sequence_log_ratios + (logprobs - logprobs.detach()))


KlEstimator = Literal["k1", "k2", "k3"]
MAX_K3 = 10.0
"""Bound of k3 for a token less likely than under the reference: reached at x = -2.61."""


def kl_to_reference(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """Estimate KL(pi || pi_ref) from tokens sampled under pi, with x = log(pi / pi_ref).

    - `k1`: x. Unbiased, often negative. For rewards: in a loss its gradient is 0 in expectation.
    - `k2`: x^2 / 2. Biased, never negative; in a loss its gradient is the divergence's in expectation.
    - `k3`: exp(-x) + x - 1. Unbiased, never negative; GRPO adds it to its loss (arXiv 2402.03300, equation 4), where
      its gradient is in expectation that of KL(pi_ref || pi). For a token that has become far less likely than
      under the reference it is bounded by 10, without a gradient: one such token would outweigh its batch, and below
      x = -88 exp(-x) is infinite. verl (`low_var_kl`) and OpenRLHF bound k3 by 10 too, but also where x is large and
      positive; here it keeps growing with x, with a slope of 1, which is its purpose.

    J. Schulman, "Approximating KL Divergence", 2020.

    Args:
        logprobs: Log-probabilities of the tokens under the policy, with gradient, shape [T].
        reference_logprobs: Those under the reference, shape [T].
        estimator: One of the above.

    Returns:
        The estimate of each token, shape [T].
    """
    x = logprobs - reference_logprobs
    if estimator == "k1":
        return x
    if estimator == "k2":
        return 0.5 * x * x
    x = x.clamp(min=-MAX_LOG_RATIO)  # exp(-x) is finite before it is bounded: its gradient is 0 and not NaN
    k3 = torch.exp(-x) + x - 1.0
    return torch.where(x < 0.0, k3.clamp(max=MAX_K3), k3)


def hold_then_anneal(progress: float, *, value: float, hold: float, final_factor: float) -> float:
    """Return `value` up to a `progress` (in [0, 1]) of `hold`, then falling linearly to `final_factor` of it at 1."""
    if progress <= hold or hold >= 1.0:
        return value
    descent = min(1.0, (progress - hold) / (1.0 - hold))
    return value * (1.0 - descent * (1.0 - final_factor))


Correction = Literal["none", "truncated", "icepop", "decoupled"]


def correction_weights(
    log_ratio: Tensor, correction: Correction, *, cap: float, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token and whether a bound changed it, each of shape [T] and without gradient.

    - `none`: 1.
    - `decoupled`: pi_prox / mu up to high, and 0 above: decoupled PPO, arXiv 2505.24298, whose code (AReaL) drops
      tokens above 5; the clip is on pi_theta / pi_prox.
    - `truncated`: min(pi_old / mu, cap), truncated importance sampling (Ionides, 2008), as used against engine
      mismatch.
    - `icepop`: pi_old / mu within [low, high], and 0 outside: IcePop, arXiv 2510.18855, whose range is [0.5, 5].

    Args:
        log_ratio: log(pi_old / mu), shape [T].
        correction: One of the above.
        cap: The largest weight of `truncated`.
        low: The smallest nonzero weight of `icepop`.
        high: The largest weight of `icepop` and `decoupled`.
    """
    ratio = weights = bounded_ratio(log_ratio.detach())
    if correction == "none":
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    if correction == "truncated":
        weights = ratio.clamp(max=cap)
    else:
        is_kept = ratio <= high if correction == "decoupled" else (ratio >= low) & (ratio <= high)
        weights = torch.where(is_kept, ratio, torch.zeros_like(ratio))
    return weights, weights != ratio


@dataclass(kw_only=True, slots=True)
class LossInputs:
    """Inputs of a loss, for the flattened loss tokens of a batch.

    Attributes:
        logprobs: Log-probabilities under the policy being trained, with gradient, shape [T].
        entropy: Entropy of that policy at each token, with gradient if `entropy_coef` is set, shape [T].
        old_logprobs: Log-probabilities under the behaviour policy, shape [T].
        advantages: Advantages, shape [T].
        reference_logprobs: Log-probabilities under the reference policy, shape [T]; None without one.
        proximal_logprobs: Log-probabilities under the policy before the iteration's first update, computed by the
            trainer, shape [T]. Ratios are relative to these; None: to the behaviour policy.
        sequence_log_ratios: Results of `sequence_means`, shape [T], if ratios are of sequences; None otherwise.
    """

    logprobs: Tensor
    entropy: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    reference_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    sequence_log_ratios: Tensor | None = None


def policy_loss(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """c_t objective_t + kl_coef KL_t - entropy_coef H_t, with c_t a correction weight without gradient.

    See `rl_bridge.algorithms.functions.LossFunction`; the configuration is that of `loss_settings`.

    Raises:
        ValueError: `kl_coef` is set without reference log-probabilities, or a correction without proximal ones.
    """
    if algorithm.kl_coef and inputs.reference_logprobs is None:
        raise ValueError(
            f"kl_coef is {algorithm.kl_coef}, so reference log-probabilities are needed; got none"
        )
    if algorithm.correction != "none" and inputs.proximal_logprobs is None:
        raise ValueError(
            f"correction is {algorithm.correction!r}, so proximal log-probabilities are needed; got none"
        )
    ratio = _compute_ratio(inputs.logprobs, inputs)
    surrogate = _compute_objective(inputs.logprobs, ratio, inputs.advantages, algorithm)
    metrics = {
        "loss/ratio_mean": ratio,
        "loss/clip_fraction_low": surrogate.clipped_low.float(),
        "loss/clip_fraction_high": surrogate.clipped_high.float(),
        "loss/dual_clip_fraction": surrogate.dual_clipped.float(),
    }
    per_token = surrogate.loss
    if inputs.proximal_logprobs is not None:
        weights, is_bounded = correction_weights(
            inputs.proximal_logprobs - inputs.old_logprobs,
            algorithm.correction,
            cap=algorithm.correction_cap,
            low=algorithm.correction_low,
            high=algorithm.correction_high,
        )
        metrics |= {"loss/correction_weight": weights, "loss/corrected_fraction": is_bounded.float()}
        per_token = weights * per_token
    if algorithm.entropy_coef:
        per_token = per_token - algorithm.entropy_coef * inputs.entropy
    if inputs.reference_logprobs is not None:
        kl = kl_to_reference(inputs.logprobs, inputs.reference_logprobs, algorithm.kl_estimator)
        metrics["policy/kl_to_reference"] = kl
        if algorithm.kl_coef:  # 0 * inf is NaN
            per_token = per_token + algorithm.kl_coef * kl
    return per_token, {name: value.detach() for name, value in metrics.items()}


def _compute_ratio(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    if inputs.sequence_log_ratios is not None:
        return sequence_ratios(logprobs, inputs.sequence_log_ratios)
    old_logprobs = inputs.old_logprobs if inputs.proximal_logprobs is None else inputs.proximal_logprobs
    return bounded_ratio(logprobs - old_logprobs)


def _compute_objective(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, algorithm: AlgorithmConfig
) -> Surrogate:
    if algorithm.objective == "reinforce":
        return reinforce(logprobs, advantages)
    if algorithm.objective == "cispo":
        return cispo(logprobs, ratio, advantages, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)
    return clipped_surrogate(
        ratio,
        advantages,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )


Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def token_weights(
    sequences: NDArray[np.int64], *, aggregation: Aggregation, max_length: int
) -> NDArray[np.float32]:
    """Return the weight of each loss token in a batch, shape [T].

    - `token_mean`: 1 / (tokens of the batch). DAPO, arXiv 2503.14476, section 3.3.
    - `sequence_mean`: 1 / (sequences x tokens of its own sequence). GRPO, arXiv 2402.03300, equation 3.
    - `fixed_length`: 1 / (sequences x max_length), in loss tokens. Dr. GRPO, arXiv 2503.20783, section 3.2.

    A sequence is a trajectory.
    """
    if not sequences.size:
        return np.zeros(0, dtype=np.float32)
    _, index, counts = np.unique(sequences, return_inverse=True, return_counts=True)
    if aggregation == "token_mean":
        weights = np.full(sequences.size, 1.0 / sequences.size)
    elif aggregation == "sequence_mean":
        weights = 1.0 / (len(counts) * counts[index])
    else:
        weights = np.full(sequences.size, 1.0 / (len(counts) * max_length))
    return weights.astype(np.float32)
