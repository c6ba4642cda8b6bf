"""What keeps a policy from collapsing: entropy, and the distance to a reference policy."""

import torch
from torch import Tensor


def categorical_entropy(log_distribution: Tensor) -> Tensor:
    """H = -sum_v p_v log p_v, in nats.

    Args:
        log_distribution: Normalised log-probabilities, shape [T, V].

    Returns:
        Shape [T].
    """
    return -(log_distribution.exp() * log_distribution).sum(-1)


def kl_to_reference(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The estimator k3 of KL(pi || pi_ref) from tokens sampled under pi: exp(-x) + x - 1, x = log(pi / pi_ref).

    Unbiased and never negative; the form that GRPO adds to its loss (arXiv 2402.03300, equation 4).

    Args:
        logprobs: Of the tokens under the policy, with gradient, shape [T].
        reference_logprobs: Of the same tokens under the reference, shape [T].

    Returns:
        Shape [T].
    """
    x = logprobs - reference_logprobs
    return torch.exp(-x) + x - 1.0


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
