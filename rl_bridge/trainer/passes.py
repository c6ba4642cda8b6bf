"""The division of a batch into updates, ranks and passes, and a rank's passes through a model."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_bridge.algorithms.policy_loss import token_weights
from rl_bridge.buffer.batch import TrainBatch, divide_documents
from rl_bridge.services.handle import EndpointOwner
from rl_bridge.titan.architecture import Architecture, read_architecture
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import PolicyVersion

if TYPE_CHECKING:
    from rl_bridge.titan.model import TitanModel

ALL_UPDATES = slice(None)

_read_architecture = lru_cache(read_architecture)
"""Reads a checkpoint's architecture once, not at every step."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RankBatch:
    """One rank's part of an iteration. All ranks make the same number of passes, some of which may be idle.

    Attributes:
        batch: The rank's loss tokens with their contexts.
        updates: The passes of each update: indices of loss tokens in `batch`, empty for an idle pass.
        sizes: The number of loss tokens of each update, over all ranks.
    """

    batch: TrainBatch
    updates: tuple[tuple[NDArray[np.int64], ...], ...]
    sizes: tuple[int, ...]


def rank_batches(
    batch: TrainBatch, settings: TrainerSettings, *, version: PolicyVersion, ranks: int
) -> list[RankBatch]:
    """Divide an iteration's loss tokens: by trajectory into updates, by context into passes of similar work.

    Tensor-parallel ranks work on the same part. The run's seed and the version determine each update's trajectories.
    """
    config, algorithm = settings.config.trainer, settings.config.algorithm
    shuffle = np.random.default_rng([settings.config.seed, version])
    parts = batch.split_by_trajectory(config.updates_per_iteration, shuffle)
    weights = np.zeros(len(batch), dtype=np.float32)
    data_ranks = ranks // config.tensor_parallel
    architecture = _read_architecture(Path(settings.model_path))
    tokens: list[list[list[NDArray[np.int64]]]] = [[] for _ in range(data_ranks)]
    for update in parts:
        weights[update] = token_weights(
            batch.trajectory[update], aggregation=algorithm.aggregation, max_length=settings.max_loss_tokens
        )
        contexts, context_index, loss_tokens = np.unique(
            batch.context[update], return_inverse=True, return_counts=True
        )
        lengths = batch.lengths[contexts]
        shares = divide_documents(
            lengths,
            costs=_compute_costs(
                architecture, lengths, loss_tokens, frozen=settings.config.model.lora is not None
            ),
            ranks=data_ranks,
            budget=settings.tokens_per_pass,
            min_passes=config.gradient_accumulation_steps,
        )
        for rank, passes in enumerate(shares):
            tokens[rank].append([update[np.isin(context_index, documents)] for documents in passes])
    batch = replace(batch, weights=weights)
    sizes = tuple(map(len, parts))
    batches = [_make_rank_batch(batch, updates, sizes) for updates in tokens]
    return [batches[rank // config.tensor_parallel] for rank in range(ranks)]


def _compute_costs(
    architecture: Architecture, lengths: NDArray[np.int64], loss_tokens: NDArray[np.int64], *, frozen: bool
) -> NDArray[np.float64]:
    """Return the operations for each context, shape [U]; attention's grow with the square of its length.

    See `Architecture.train_flops`. A context counts once, however many trajectories share it, the last layer for each
    of its `loss_tokens`.
    """
    documents = zip(lengths.tolist(), loss_tokens.tolist(), strict=True)
    return np.array([architecture.train_flops([length], count, frozen=frozen) for length, count in documents])


def _make_rank_batch(
    batch: TrainBatch, updates: list[list[NDArray[np.int64]]], sizes: tuple[int, ...]
) -> RankBatch:
    own_tokens = np.sort(np.concatenate([tokens for passes in updates for tokens in passes]))
    return RankBatch(
        batch=batch.take(own_tokens),
        updates=tuple(tuple(np.searchsorted(own_tokens, tokens) for tokens in passes) for passes in updates),
        sizes=sizes,
    )


class Passes:
    """Runs passes of a batch through a model. A rank whose pass is idle still takes part in collectives.

    Attributes:
        tokens: The number of tokens of rows for which this rank has computed gradients since `begin`.
        flops: The model's floating-point operations for these.
    """

    def __init__(self, model: "TitanModel") -> None:
        self._model = model
        self.begin()

    def begin(self) -> None:
        """Reset the counts for a new step."""
        self.tokens, self.flops = 0, 0.0

    def backward(self, rank_batch: RankBatch, update: int, loss: Callable[[TrainBatch], Tensor]) -> float:
        """Accumulate an update's gradient; returns its loss.

        `loss` returns a pass's scalar, whose sum over all passes of all ranks is the update's loss.
        """
        total = 0.0
        for tokens in rank_batch.updates[update]:
            with self._model.spmd():
                if len(tokens):
                    micro_batch = rank_batch.batch.take(tokens)
                    micro_loss = loss(micro_batch)
                    self.tokens += int(micro_batch.lengths.sum())
                    self.flops += self._model.train_flops(micro_batch)
                else:
                    micro_loss = self._model.idle()
                micro_loss.backward()  # type: ignore[no-untyped-call]
                total += float(micro_loss.detach())
        return float(self._model.sum_over_data(torch.tensor([total], dtype=torch.float64)))

    @torch.no_grad()
    def evaluate(
        self, rank_batch: RankBatch, value: Callable[[TrainBatch], Tensor], *, updates: slice = ALL_UPDATES
    ) -> NDArray[np.float32]:
        """Compute a value for each of this rank's loss tokens, without gradient, shape [the rank's T].

        `value` returns those of a pass, shape [its T]. Tokens of other updates than the given ones get 0.
        """
        result = np.zeros(len(rank_batch.batch), dtype=np.float32)
        for tokens in chain.from_iterable(rank_batch.updates[updates]):
            with self._model.spmd():
                if len(tokens):
                    result[tokens] = value(rank_batch.batch.take(tokens)).float().cpu().numpy()
                else:
                    self._model.idle()
        return result

    def gather_values(self, batch: TrainBatch, values: NDArray[np.generic]) -> NDArray[np.float64]:
        """Combine all ranks' values of their loss tokens: float64, shape [T of the whole batch], on every rank."""
        result = torch.zeros(batch.total, dtype=torch.float64)
        result[torch.from_numpy(batch.index)] = torch.from_numpy(values.astype(np.float64))
        summed: NDArray[np.float64] = self._model.sum_over_data(result).numpy()
        return summed


async def reference_logprobs(
    reference: EndpointOwner, batch: TrainBatch, model_path: Path
) -> NDArray[np.float32]:
    """Return the log-probability of each loss token under the reference policy, shape [T].

    The contexts are divided over the serving replicas such that each gets about as much work. `model_path` is the
    reference's checkpoint.
    """
    roster = getattr(reference, "roster", None)  # a local object is its own only replica
    replicas = 1 if roster is None else max(1, len(roster.targets))
    loss_tokens = np.bincount(batch.context, minlength=len(batch.lengths))
    costs = _compute_costs(_read_architecture(model_path), batch.lengths, loss_tokens, frozen=False)
    shares = divide_documents(batch.lengths, costs=costs, ranks=replicas, budget=int(batch.lengths.sum()))
    parts = [np.flatnonzero(np.isin(batch.context, contexts)) for (contexts,) in shares if len(contexts)]
    replies = await asyncio.gather(*(reference.logprobs.route(batch.take(tokens)) for tokens in parts))
    logprobs = np.empty(len(batch), dtype=np.float32)
    for tokens, reply in zip(parts, replies, strict=True):
        logprobs[tokens] = reply
    return logprobs
