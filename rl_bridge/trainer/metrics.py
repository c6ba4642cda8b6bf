"""Metrics of one training step, gathered over passes and ranks."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl_bridge.titan.ranks import union

_SUMS = ("tokens", "early_tokens", "difference", "fresh_tokens", "difference_abs", "valid", "padded")


class LossMetrics:
    """Sums over tokens, so that means over any number of passes are exact.

    A rank that had no loss token has sums of zero: ranks can always add theirs up.
    """

    def __init__(self) -> None:
        self._of_loss: dict[str, float] = {}
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._largest = 0.0

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Take what the loss of one pass says, each of shape [T], by the names that the log uses."""
        self._sums["tokens"] += len(next(iter(metrics.values())))
        for name, values in metrics.items():
            self._of_loss[name] = self._of_loss.get(name, 0.0) + float(values.sum())

    def add_mismatch(self, difference: Tensor, *, fresh: Tensor) -> None:
        """Take the differences of one pass before the iteration's first update; after it they are learning too.

        Args:
            difference: The trainer's log-probabilities less those that tokens were sampled with, shape [T].
            fresh: True for tokens that the very weights have sampled that the trainer holds, shape [T]: there it is
                the engine's mismatch and not age.
        """
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
        names = union(self._of_loss)  # a rank that had no token knows none
        own = [*self._sums.values(), *(self._of_loss.get(name, 0.0) for name in names)]
        sums = sum_over_ranks(torch.tensor(own, dtype=torch.float64)).tolist()
        largest = max_over_ranks(torch.tensor([self._largest], dtype=torch.float64))
        total = dict(zip([*_SUMS, *names], sums, strict=True))
        found = {name: total[name] / max(1.0, total["tokens"]) for name in names}
        found["mismatch/kl"] = -total["difference"] / max(1.0, total["early_tokens"])
        if fresh := total["fresh_tokens"]:
            found["mismatch/logprob_max"] = float(largest)
            found["mismatch/logprob_mean"] = total["difference_abs"] / fresh
        found["train/valid_token_share"] = total["valid"] / max(1.0, total["padded"])
        return found
