"""The loss of each token, put together from its parts, and the weights by which tokens are averaged."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_bridge.algorithms.regularizers import correction_weights, kl_to_reference
from rl_bridge.algorithms.surrogate import Surrogate, cispo, clipped_surrogate, reinforce, sequence_ratios
from rl_bridge.config import AlgorithmConfig


@dataclass(kw_only=True, slots=True)
class LossInputs:
    """The loss tokens of a batch, flattened.

    Attributes:
        logprobs: Under the policy being trained, with gradient, shape [T].
        entropy: Of its distribution at each token, with gradient where `entropy_coef` is set, shape [T].
        old_logprobs: Behaviour log-probabilities, shape [T].
        advantages: Shape [T].
        reference_logprobs: Under the reference policy, shape [T]; None where there is none.
        proximal_logprobs: Under the policy before the iteration's first update, as the trainer computes them, shape
            [T]. Ratios are against these; None where they are against the behaviour.
        sequence_log_ratios: From `sequence_means`, shape [T], where ratios are those of sequences; None otherwise.
    """

    logprobs: Tensor
    entropy: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    reference_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    sequence_log_ratios: Tensor | None = None


def policy_loss(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """c_t objective_t + kl_coef KL_t - entropy_coef H_t, c_t a weight without gradient.

    Args:
        inputs: What is known of the tokens.
        algorithm: `algorithm.*`, as `loss_settings` has it.

    Returns:
        The loss of each token, with gradient, shape [T]; and metrics without gradient, by the names that the log uses,
        each of shape [T]. See `rl_bridge.algorithms.functions.LossFunction`.

    Raises:
        ValueError: `kl_coef` is set and no reference log-probabilities came, or a correction and no proximal ones.
    """
    if algorithm.kl_coef and inputs.reference_logprobs is None:
        raise ValueError(
            f"kl_coef is {algorithm.kl_coef}, so reference log-probabilities are needed; got none"
        )
    if algorithm.correction != "none" and inputs.proximal_logprobs is None:
        raise ValueError(
            f"correction is {algorithm.correction!r}, so proximal log-probabilities are needed; got none"
        )
    ratio = _ratio(inputs.logprobs, inputs)
    surrogate = _objective(inputs.logprobs, ratio, inputs.advantages, algorithm)
    metrics = {
        "loss/ratio_mean": ratio,
        "loss/clip_fraction_low": surrogate.clipped_low.float(),
        "loss/clip_fraction_high": surrogate.clipped_high.float(),
    }
    if algorithm.dual_clip is not None:
        metrics["loss/dual_clip_fraction"] = surrogate.dual_clipped.float()
    per_token = surrogate.loss
    if inputs.proximal_logprobs is not None:
        weights, bounded = correction_weights(
            inputs.proximal_logprobs - inputs.old_logprobs,
            algorithm.correction,
            cap=algorithm.correction_cap,
            low=algorithm.correction_low,
            high=algorithm.correction_high,
        )
        metrics |= {"loss/correction_weight": weights, "loss/corrected_fraction": bounded.float()}
        per_token = weights * per_token
    if algorithm.entropy_coef:
        per_token = per_token - algorithm.entropy_coef * inputs.entropy
    if inputs.reference_logprobs is not None:
        kl = kl_to_reference(inputs.logprobs, inputs.reference_logprobs, algorithm.kl_estimator)
        metrics["policy/kl_to_reference"] = kl
        if algorithm.kl_coef:  # 0 times what is infinite is no number
            per_token = per_token + algorithm.kl_coef * kl
    return per_token, {name: value.detach() for name, value in metrics.items()}


def _ratio(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    if inputs.sequence_log_ratios is not None:
        return sequence_ratios(logprobs, inputs.sequence_log_ratios)
    old = inputs.old_logprobs if inputs.proximal_logprobs is None else inputs.proximal_logprobs
    return torch.exp(logprobs - old)


def _objective(logprobs: Tensor, ratio: Tensor, advantages: Tensor, algorithm: AlgorithmConfig) -> Surrogate:
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
    """The weight of each loss token in a batch.

    - `token_mean`: 1 / (tokens of the batch). DAPO, arXiv 2503.14476, section 3.3.
    - `sequence_mean`: 1 / (sequences x tokens of the own sequence). GRPO, arXiv 2402.03300, equation 3.
    - `fixed_length`: 1 / (sequences x max_length). Dr. GRPO, arXiv 2503.20783, section 3.2.

    Args:
        sequences: Which sequence (trajectory) each loss token belongs to, shape [T].
        aggregation: One of the above.
        max_length: The longest a sequence may become, in loss tokens; used by `fixed_length` alone.

    Returns:
        Shape [T].
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
