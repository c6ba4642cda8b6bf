"""Figures of one training step, gathered over micro-batches."""

from collections import defaultdict

import torch
from torch import Tensor


class FigureAccumulator:
    """Sums per-token figures, so that means over any number of micro-batches are exact."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._tokens = 0
        self._fresh_difference: list[Tensor] = []

    def add(self, figures: dict[str, Tensor], *, fresh: bool) -> None:
        """Take the figures of one micro-batch.

        Args:
            figures: From `policy_loss`, each of shape [T].
            fresh: True while the weights are still those of the iteration's beginning, so that the
                difference of log-probabilities is the engine's mismatch and not learning.
        """
        self._tokens += len(figures["ratio"])
        for name, values in figures.items():
            if name != "logprob_difference":
                self._sums[name] += float(values.sum())
        if fresh:
            self._fresh_difference.append(figures["logprob_difference"])

    def result(self) -> dict[str, float]:
        """Means over the loss tokens, under the names that the log uses.

        `mismatch/*` compare trainer and engine on the same tokens before the iteration's first update:
        the largest and the mean absolute difference of log-probabilities, and the KL divergence of the
        engine's distribution from the trainer's, estimated by k1 as the mean of log mu - log pi.
        """
        means = {name: total / max(1, self._tokens) for name, total in self._sums.items()}
        renamed = {
            "ratio": "loss/ratio_mean",
            "clipped_low": "loss/clip_fraction_low",
            "clipped_high": "loss/clip_fraction_high",
            "entropy": "policy/entropy",
            "kl": "policy/kl_to_reference",
        }
        result = {renamed[name]: value for name, value in means.items()}
        difference = torch.cat(self._fresh_difference)
        result["mismatch/logprob_max"] = float(difference.abs().max())
        result["mismatch/logprob_mean"] = float(difference.abs().mean())
        result["mismatch/kl"] = float(-difference.mean())
        return result
