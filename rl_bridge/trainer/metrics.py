"""Metrics of one training step, gathered over passes and ranks."""

from collections.abc import Callable

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
"""What `policy_loss` tells of each token, and what the log calls the mean."""
_SUMS = (*_MEANS, "tokens", "early_tokens", "difference", "fresh_tokens", "difference_abs", "valid", "padded")


class LossMetrics:
    """Sums over tokens, so that means over any number of passes are exact.

    A rank that had no loss token has sums of zero: ranks can always add theirs up.

    Args:
        algorithm: Says which parts the loss has.
        with_reference: Whether there are log-probabilities under a reference.
    """

    def __init__(self, algorithm: AlgorithmConfig, *, with_reference: bool) -> None:
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._largest = 0.0
        hidden = {
            "kl": not with_reference,
            "dual_clipped": algorithm.dual_clip is None,
            "correction": not algorithm.recomputes_old,
            "corrected": not algorithm.recomputes_old,
        }
        self._shown = [name for name in _MEANS if not hidden.get(name)]

    def add(self, told: dict[str, Tensor], *, fresh: Tensor | None) -> None:
        """Take what the loss of one pass tells.

        Args:
            told: From `policy_loss`, each of shape [T].
            fresh: True for tokens that the very weights have sampled that the trainer holds, shape [T]: there the
                difference of log-probabilities is the engine's mismatch and not age. None after the iteration's first
                update, from where on it is learning too.
        """
        self._sums["tokens"] += len(told["ratio"])
        for name, values in told.items():
            if name in _MEANS:
                self._sums[name] += float(values.sum())
        if fresh is None:
            return
        difference = told["logprob_difference"]
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

    def reduced(
        self, sum_over_ranks: Callable[[Tensor], Tensor], max_over_ranks: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        """Means over the loss tokens of all ranks, under the names that the log uses.

        `mismatch/*` compare the probabilities that tokens were sampled with and the trainer's, before the iteration's
        first update. `mismatch/kl` is the divergence of the sampling distribution from the trainer's, estimated by k1
        as the mean of log mu - log pi over all tokens; where some are of older weights it holds their age too. The mean
        and the largest absolute difference of log-probabilities are those of engine and trainer alone, over tokens that
        the trainer's own version of the weights has sampled; they are left out where there are none.
        `train/valid_token_share` says how much of the forward passes was no padding.
        """
        sums = sum_over_ranks(torch.tensor(list(self._sums.values()), dtype=torch.float64)).tolist()
        largest = max_over_ranks(torch.tensor([self._largest], dtype=torch.float64))
        total = dict(zip(_SUMS, sums, strict=True))
        found = {_MEANS[name]: total[name] / max(1.0, total["tokens"]) for name in self._shown}
        found["mismatch/kl"] = -total["difference"] / max(1.0, total["early_tokens"])
        if fresh := total["fresh_tokens"]:
            found["mismatch/logprob_max"] = float(largest)
            found["mismatch/logprob_mean"] = total["difference_abs"] / fresh
        found["train/valid_token_share"] = total["valid"] / max(1.0, total["padded"])
        return found
