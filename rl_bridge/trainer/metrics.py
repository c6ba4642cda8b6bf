"""Metrics of one training step, gathered over passes and ranks."""

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
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
        """Take a pass's log-probabilities of the trainer less those that tokens were sampled with, shape [T].

        Only before the iteration's first update; after it they are learning too. `fresh` is true for tokens that the
        very weights have sampled that the trainer holds: there it is the engine's mismatch and not age.
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

    def reduce(
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
        metrics = {name: total[name] / max(1.0, total["tokens"]) for name in names}
        metrics["mismatch/kl"] = -total["difference"] / max(1.0, total["early_tokens"])
        if fresh := total["fresh_tokens"]:
            metrics["mismatch/logprob_max"] = float(largest)
            metrics["mismatch/logprob_mean"] = total["difference_abs"] / fresh
        metrics["train/valid_token_share"] = total["valid"] / max(1.0, total["padded"])
        return metrics


def peak_flops(name: str) -> float | None:
    """Dense operations in bfloat16 a second of a GPU, by CUDA's name for it; None where TorchTitan does not know it."""
    from torchtitan.tools.utils import get_peak_flops

    flops: float = get_peak_flops(name)
    # It takes what it does not know for an A100.
    return flops if "A100" in name or flops != get_peak_flops("A100") else None


class StepMeter:
    """What a step gets done in its time, and the most memory that it takes of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._peak = peak_flops(torch.cuda.get_device_name(device)) if self._on_gpu else None
        self._began = 0.0

    def begin(self) -> None:
        """A step begins."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def metrics(self, *, tokens: float, flops: float) -> dict[str, float]:
        """Of the step that ends now, under the names that the log uses; the same on every rank.

        `train/tokens_per_s` are tokens of rows that gave a gradient, prompts included. `train/mfu` is the share of the
        GPUs' peak in bfloat16 that the model's own operations make up (`Architecture.train_flops`), of a known GPU.
        Time and memory are those of the rank that has most.
        """
        most = [0.0, 0.0, 0.0]
        if self._on_gpu:
            torch.cuda.synchronize()
            most[1:] = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
        most[0] = time.perf_counter() - self._began
        over_ranks = torch.tensor(most, dtype=torch.float64)
        if (ranks := dist.get_world_size()) > 1:
            dist.all_reduce(over_ranks, op=dist.ReduceOp.MAX)
        seconds, allocated, reserved = over_ranks.tolist()
        metrics = {
            "train/tokens_per_s": tokens / seconds,
            "train/tokens_per_s_per_rank": tokens / seconds / ranks,
            "train/flops_per_token": flops / max(1.0, tokens),
        }
        if self._peak is not None:
            metrics["train/mfu"] = flops / seconds / (ranks * self._peak)
        if self._on_gpu:
            metrics |= {"memory/allocated_gb": allocated / 1e9, "memory/reserved_gb": reserved / 1e9}
        return metrics
