"""Figures of one training step, gathered over micro-batches and ranks."""

import torch
from torch import Tensor

_MEANS = {
    "ratio": "loss/ratio_mean",
    "clipped_low": "loss/clip_fraction_low",
    "clipped_high": "loss/clip_fraction_high",
    "entropy": "policy/entropy",
    "kl": "policy/kl_to_reference",
}
"""Per-token figures of `policy_loss`, and what the log calls their means."""
_SUMS = (*_MEANS, "tokens", "fresh_tokens", "difference", "difference_abs", "valid", "padded")


class FigureAccumulator:
    """Sums per-token figures, so that means over any number of micro-batches are exact.

    A rank that had no loss token has sums of zero: ranks can always add theirs up.
    """

    def __init__(self) -> None:
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._largest = 0.0

    def add(self, figures: dict[str, Tensor], *, fresh: Tensor) -> None:
        """Take the figures of one micro-batch.

        Args:
            figures: From `policy_loss`, each of shape [T].
            fresh: True for tokens that the very weights have sampled that the trainer holds, shape [T]: there the
                difference of log-probabilities is the engine's mismatch and not learning.
        """
        self._sums["tokens"] += len(figures["ratio"])
        for name, values in figures.items():
            if name in _MEANS:
                self._sums[name] += float(values.sum())
        difference = figures["logprob_difference"][fresh]
        if len(difference):
            self._sums["fresh_tokens"] += len(difference)
            self._sums["difference"] += float(difference.sum())
            self._sums["difference_abs"] += float(difference.abs().sum())
            self._largest = max(self._largest, float(difference.abs().max()))

    def add_rows(self, *, valid: int, padded: int) -> None:
        """Take the size of one forward pass: tokens of documents, and those with padding."""
        self._sums["valid"] += valid
        self._sums["padded"] += padded

    @property
    def sums(self) -> Tensor:
        """What ranks add up, float64."""
        return torch.tensor([self._sums[name] for name in _SUMS], dtype=torch.float64)

    @property
    def largest(self) -> Tensor:
        """What ranks take the maximum of, float64, shape [1]."""
        return torch.tensor([self._largest], dtype=torch.float64)


def figures_of(sums: Tensor, largest: Tensor, *, with_reference: bool) -> dict[str, float]:
    """Means over the loss tokens of all ranks, under the names that the log uses.

    `mismatch/*` compare trainer and engine on tokens that the trainer's own version of the weights has sampled,
    before the iteration's first update: the largest and the mean absolute difference of log-probabilities, and the KL
    divergence of the engine's distribution from the trainer's, estimated by k1 as the mean of log mu - log pi. They are
    left out where all tokens are of older weights. `train/valid_token_share` says how much of the forward passes was no
    padding.
    """
    total = dict(zip(_SUMS, sums.tolist(), strict=True))
    means = {
        shown: total[name] / max(1.0, total["tokens"])
        for name, shown in _MEANS.items()
        if with_reference or name != "kl"
    }
    fresh = total["fresh_tokens"]
    mismatch = (
        {
            "mismatch/logprob_max": float(largest),
            "mismatch/logprob_mean": total["difference_abs"] / fresh,
            "mismatch/kl": -total["difference"] / fresh,
        }
        if fresh
        else {}
    )
    return {
        **means,
        **mismatch,
        "train/valid_token_share": total["valid"] / max(1.0, total["padded"]),
    }
