"""Figures of one training step, gathered over micro-batches and ranks."""

from collections.abc import Collection

import torch
from torch import Tensor

from rl_bridge.config import AlgorithmConfig

_MEANS = {
    "ratio": "loss/ratio_mean",
    "clipped_low": "loss/clip_fraction_low",
    "clipped_high": "loss/clip_fraction_high",
    "entropy": "policy/entropy",
    "kl": "policy/kl_to_reference",
    "dual_clipped": "loss/dual_clip_fraction",
    "correction": "loss/correction_weight",
    "corrected": "loss/corrected_fraction",
}
"""Per-token figures of `policy_loss`, and what the log calls their means."""
ALWAYS = frozenset({"ratio", "clipped_low", "clipped_high", "entropy"})
"""Those that every loss has. The others are told where the settings ask for them."""
_SUMS = (*_MEANS, "tokens", "early_tokens", "difference", "fresh_tokens", "difference_abs", "valid", "padded")


class FigureAccumulator:
    """Sums per-token figures, so that means over any number of micro-batches are exact.

    A rank that had no loss token has sums of zero: ranks can always add theirs up.
    """

    def __init__(self) -> None:
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._largest = 0.0

    def add(self, figures: dict[str, Tensor], *, fresh: Tensor | None) -> None:
        """Take the figures of one micro-batch.

        Args:
            figures: From `policy_loss`, each of shape [T].
            fresh: True for tokens that the very weights have sampled that the trainer holds, shape [T]: there the
                difference of log-probabilities is the engine's mismatch and not age. None after the iteration's first
                update, from where on it is learning too.
        """
        self._sums["tokens"] += len(figures["ratio"])
        for name, values in figures.items():
            if name in _MEANS:
                self._sums[name] += float(values.sum())
        if fresh is None:
            return
        difference = figures["logprob_difference"]
        self._sums["early_tokens"] += len(difference)
        self._sums["difference"] += float(difference.sum())
        of_engine = difference[fresh].abs()
        if len(of_engine):
            self._sums["fresh_tokens"] += len(of_engine)
            self._sums["difference_abs"] += float(of_engine.sum())
            self._largest = max(self._largest, float(of_engine.max()))

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


def shown_figures(algorithm: AlgorithmConfig, *, with_reference: bool) -> frozenset[str]:
    """The per-token figures that a run has.

    Args:
        algorithm: Says which parts the loss has.
        with_reference: Whether there are log-probabilities under a reference.
    """
    there = {
        "kl": with_reference,
        "dual_clipped": algorithm.dual_clip is not None,
        "correction": algorithm.recomputes_old,
        "corrected": algorithm.recomputes_old,
    }
    return ALWAYS | {name for name, shown in there.items() if shown}


def figures_of(sums: Tensor, largest: Tensor, *, shown: Collection[str]) -> dict[str, float]:
    """Means over the loss tokens of all ranks, under the names that the log uses.

    Args:
        sums: Those of all ranks, added up.
        largest: The maximum over all ranks.
        shown: From `shown_figures`.

    `mismatch/*` compare the probabilities that tokens were sampled with and the trainer's, before the iteration's first
    update. `mismatch/kl` is the divergence of the sampling distribution from the trainer's, estimated by k1 as the mean
    of log mu - log pi over all tokens; where some are of older weights it holds their age too. The mean and the largest
    absolute difference of log-probabilities are those of engine and trainer alone, over tokens that the trainer's own
    version of the weights has sampled; they are left out where there are none. `train/valid_token_share` says how much
    of the forward passes was no padding.
    """
    total = dict(zip(_SUMS, sums.tolist(), strict=True))
    means = {
        logged: total[name] / max(1.0, total["tokens"]) for name, logged in _MEANS.items() if name in shown
    }
    fresh = total["fresh_tokens"]
    of_engine = (
        {"mismatch/logprob_max": float(largest), "mismatch/logprob_mean": total["difference_abs"] / fresh}
        if fresh
        else {}
    )
    return {
        **means,
        "mismatch/kl": -total["difference"] / max(1.0, total["early_tokens"]),
        **of_engine,
        "train/valid_token_share": total["valid"] / max(1.0, total["padded"]),
    }
