"""GRPO's loss, put together from its parts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_bridge.algorithms.regularizers import categorical_entropy, kl_to_reference
from rl_bridge.algorithms.surrogate import clipped_surrogate


@dataclass(kw_only=True, slots=True, frozen=True)
class LossSettings:
    """The knobs of the loss; see `rl_bridge.config.AlgorithmConfig` for their meaning."""

    clip_low: float
    clip_high: float
    entropy_coef: float
    kl_coef: float


@dataclass(kw_only=True, slots=True)
class LossInputs:
    """The loss tokens of a batch, flattened.

    Attributes:
        log_distribution: Of the policy being trained at each token, with gradient, shape [T, V].
        targets: The tokens that were sampled, shape [T].
        old_logprobs: Their behaviour log-probabilities, shape [T].
        advantages: Shape [T].
        weights: From `token_weights`, shape [T].
        reference_logprobs: Under the reference policy, shape [T]; None where there is none.
    """

    log_distribution: Tensor
    targets: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    reference_logprobs: Tensor | None = None


def policy_loss(inputs: LossInputs, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """sum_t w_t (surrogate_t + kl_coef k3_t - entropy_coef H_t).

    Returns:
        The loss, a scalar with gradient; and per-token figures without gradient, each of shape [T]:
        `ratio`, `clipped_low`, `clipped_high`, `entropy`, `logprob_difference` (policy minus behaviour),
        and `kl` where there is a reference.

    Raises:
        ValueError: `kl_coef` is set and no reference log-probabilities came.
    """
    if settings.kl_coef and inputs.reference_logprobs is None:
        raise ValueError(
            f"kl_coef is {settings.kl_coef}, so reference log-probabilities are needed; got none"
        )
    logprobs = inputs.log_distribution.gather(-1, inputs.targets.unsqueeze(-1)).squeeze(-1)
    surrogate = clipped_surrogate(
        logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    entropy = categorical_entropy(inputs.log_distribution)
    per_token = surrogate.loss - settings.entropy_coef * entropy
    figures = {
        "ratio": surrogate.ratio,
        "clipped_low": surrogate.clipped_low.float(),
        "clipped_high": surrogate.clipped_high.float(),
        "entropy": entropy,
        "logprob_difference": logprobs - inputs.old_logprobs,
    }
    if inputs.reference_logprobs is not None:
        figures["kl"] = kl_to_reference(logprobs, inputs.reference_logprobs)
        per_token = per_token + settings.kl_coef * figures["kl"]
    loss = torch.sum(inputs.weights * per_token)
    return loss, {name: value.detach() for name, value in figures.items()}
