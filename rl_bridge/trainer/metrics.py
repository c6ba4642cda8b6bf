"""Metrics of one training step, gathered over passes and ranks."""

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_bridge.titan.ranks import gather_names

_EDGES = 10.0 ** np.arange(-9, 2, 0.05)
"""Upper edges of classes of absolute differences, 20 to a power of ten, by which percentiles are found over ranks."""
_PERCENTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
_SUMS = ("tokens", "early_tokens", "difference", "fresh_tokens", "difference_abs", "valid", "padded")


class LossMetrics:
    """Sums over tokens, so that means over any number of passes are exact.

    A rank without loss tokens has sums of zero, so the sums can always be added over ranks.
    """

    def __init__(self) -> None:
        self._loss_sums: dict[str, float] = {}
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._max_difference = 0.0
        self._difference_counts = np.zeros(len(_EDGES) + 1)

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the loss's metrics of one pass, each of shape [T], by their names in the log."""
        self._sums["tokens"] += len(next(iter(metrics.values())))
        for name, values in metrics.items():
            self._loss_sums[name] = self._loss_sums.get(name, 0.0) + float(values.sum())

    def add_mismatch(self, difference: Tensor, *, fresh: Tensor) -> None:
        """Add a pass's differences: the trainer's log-probabilities minus those of sampling, shape [T].

        Call this only before the iteration's first update, after which differences include what was learned. `fresh`
        marks tokens sampled by the same version of the weights as the trainer's, whose difference is due to the engine
        and not to staleness.
        """
        self._sums["early_tokens"] += len(difference)
        self._sums["difference"] += float(difference.sum())
        engine_difference = difference[fresh].abs()
        if len(engine_difference):
            self._sums["fresh_tokens"] += len(engine_difference)
            self._sums["difference_abs"] += float(engine_difference.sum())
            self._max_difference = max(self._max_difference, float(engine_difference.max()))
            places = np.searchsorted(_EDGES, engine_difference.cpu().numpy())
            self._difference_counts += np.bincount(places, minlength=len(_EDGES) + 1)

    def add_rows(self, *, valid: int, padded: int) -> None:
        """Add the size of one forward pass: its tokens without and with padding."""
        self._sums["valid"] += valid
        self._sums["padded"] += padded

    def reduce(
        self, sum_over_ranks: Callable[[Tensor], Tensor], max_over_ranks: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        """Return means over the loss tokens of all ranks, by their names in the log.

        `mismatch/*` compare the sampling probabilities with the trainer's before the iteration's first update.
        `mismatch/kl` is the divergence of the sampling distribution from the trainer's, estimated by k1 as the mean of
        log mu - log pi over all tokens; with tokens of older weights it includes their staleness. The mean and largest
        absolute differences of log-probabilities are due to the engine alone: they cover only tokens sampled by the
        trainer's version of the weights, and are omitted if there are none. So are their percentiles, upper bounds that
        are at most 12% too large. `train/valid_token_share` is the share of
        the forward passes' tokens that is not padding.
        """
        names = gather_names(self._loss_sums)  # a rank without tokens has no names
        own_sums = [*self._sums.values(), *(self._loss_sums.get(name, 0.0) for name in names)]
        all_sums = sum_over_ranks(torch.tensor([*own_sums, *self._difference_counts], dtype=torch.float64))
        sums, counts = all_sums[: len(own_sums)].tolist(), all_sums[len(own_sums) :].numpy()
        largest = max_over_ranks(torch.tensor([self._max_difference], dtype=torch.float64))
        total = dict(zip([*_SUMS, *names], sums, strict=True))
        metrics = {name: total[name] / max(1.0, total["tokens"]) for name in names}
        metrics["mismatch/kl"] = -total["difference"] / max(1.0, total["early_tokens"])
        if fresh := total["fresh_tokens"]:
            metrics["mismatch/logprob_max"] = float(largest)
            metrics["mismatch/logprob_mean"] = total["difference_abs"] / fresh
            bounds = np.append(_EDGES, np.inf)
            for name, share in _PERCENTILES.items():
                bound = bounds[np.searchsorted(np.cumsum(counts), share * fresh)]
                metrics[f"mismatch/logprob_{name}"] = min(float(bound), float(largest))
        metrics["train/valid_token_share"] = total["valid"] / max(1.0, total["padded"])
        return metrics


def peak_flops(name: str) -> float | None:
    """Return a GPU's peak dense bfloat16 operations per second, by CUDA's name for it; None if it is unknown."""
    from torchtitan.tools.utils import get_peak_flops

    flops: float = get_peak_flops(name)
    # TorchTitan takes an unknown GPU for an A100.
    return flops if "A100" in name or flops != get_peak_flops("A100") else None


class StepMeter:
    """Measures a step's throughput and its peak GPU memory."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._peak = peak_flops(torch.cuda.get_device_name(device)) if self._on_gpu else None
        self._began = 0.0

    def begin(self) -> None:
        """Start measuring a step."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def metrics(self, *, tokens: float, flops: float) -> dict[str, float]:
        """Return the metrics of the step that ends now, by their names in the log; the same on every rank.

        `train/tokens_per_s` counts computed tokens with a gradient, prompts included. `train/mfu` is the model's
        operations (`Architecture.train_flops`) as a share of the GPUs' bfloat16 peak, if that is known. Time and memory
        are the maxima over ranks.
        """
        maxima = [0.0, 0.0, 0.0]
        if self._on_gpu:
            torch.cuda.synchronize()
            maxima[1:] = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
        maxima[0] = time.perf_counter() - self._began
        over_ranks = torch.tensor(maxima, dtype=torch.float64)
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
