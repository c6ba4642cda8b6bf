"""The division of a batch into updates, ranks and passes, and a rank's passes through a model."""

import asyncio
import math
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
from rl_bridge.buffer.forest import block_length, select_shared, sort_by_prefix
from rl_bridge.services.handle import EndpointOwner
from rl_bridge.titan.architecture import Architecture, read_architecture
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import PolicyVersion

if TYPE_CHECKING:
    from rl_bridge.titan.model import TitanModel

ALL_UPDATES = slice(None)

architecture_at = lru_cache(read_architecture)
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
    data_ranks = ranks // config.parallel.tp
    architecture = architecture_at(Path(settings.model_path))
    tokens: list[list[list[NDArray[np.int64]]]] = [[] for _ in range(data_ranks)]
    if settings.config.shares_prefixes:
        batch = with_shared_prefixes(batch, architecture)
    for update in parts:
        weights[update] = token_weights(
            batch.trajectory[update], aggregation=algorithm.aggregation, max_length=settings.max_loss_tokens
        )
        shares = divide_contexts(
            batch.take(update),
            architecture,
            ranks=data_ranks,
            budget=settings.tokens_per_pass,
            min_passes=config.gradient_accumulation_steps,
            frozen=settings.config.model.lora is not None,
        )
        _, context_index = np.unique(batch.context[update], return_inverse=True)
        for rank, passes in enumerate(shares):
            tokens[rank].append([update[np.isin(context_index, documents)] for documents in passes])
    batch = replace(batch, weights=weights)
    sizes = tuple(map(len, parts))
    batches = [_make_rank_batch(batch, updates, sizes) for updates in tokens]
    return [batches[rank // config.parallel.tp] for rank in range(ranks)]


def frozen_batch(batch: TrainBatch, settings: TrainerSettings, *, rank: int, ranks: int) -> RankBatch:
    """Return a rank's part of loss tokens for the reference alone, as one update."""
    config = settings.config
    batch = replace(
        batch, index=np.arange(len(batch)), total=len(batch)
    )  # of a batch that may be a part itself
    architecture = architecture_at(Path(settings.model_path))
    if config.shares_prefixes:
        batch = with_shared_prefixes(batch, architecture)
    degree = config.reference_parallel.tp
    shares = divide_contexts(batch, architecture, ranks=ranks // degree, budget=settings.tokens_per_pass)
    passes = [np.flatnonzero(np.isin(batch.context, contexts)) for contexts in shares[rank // degree]]
    return _make_rank_batch(batch, [passes], (len(batch),))


def with_shared_prefixes(batch: TrainBatch, architecture: Architecture) -> TrainBatch:
    """Return the batch with shared prefixes if that takes fewer operations, otherwise as it is.

    A token's matrices take as much as attention to active_layer_parameters / (2 x heads x head_dim) keys (see
    `Architecture.train_flops`). Without sharing, a token attends to half its context, by the kernel for causal
    attention. With it, a block attends to all its keys (see `block_length`).
    """
    matrices = architecture.active_layer_parameters / (2 * architecture.heads * architecture.head_dim)
    longest, shared = int(batch.lengths.max()), replace(batch, shares_prefixes=True)
    separate = float((batch.lengths * (matrices + batch.lengths / 2)).sum())
    together = float(shared.computed.sum()) * (matrices + longest + block_length(longest))
    return shared if together < separate else batch


def divide_contexts(
    batch: TrainBatch,
    architecture: Architecture,
    *,
    ranks: int,
    budget: int,
    min_passes: int = 1,
    frozen: bool = False,
) -> list[list[NDArray[np.int64]]]:
    """Divide a batch's contexts by `divide_documents`, with the operations of each as its cost.

    A context counts once, however many trajectories share it, the last layer for each of its loss tokens; see
    `Architecture.train_flops`. If prefixes are shared, families of contexts take the place of documents: contexts that
    follow each other in the order of prefixes. Large ones save more, small ones divide more evenly, so several sizes
    are tried. A pass shares prefixes between its families too, so it may take less than its budget.

    Returns:
        For each rank and each of its passes, the contexts' indices.
    """
    lengths, loss_tokens = batch.lengths, np.bincount(batch.context, minlength=len(batch.lengths))
    documents = list(zip(lengths.tolist(), loss_tokens.tolist(), strict=True))
    costs = np.array(
        [architecture.train_flops([length], count, frozen=frozen) for length, count in documents]
    )
    if not batch.shares_prefixes:
        return divide_documents(lengths, costs=costs, ranks=ranks, budget=budget, min_passes=min_passes)
    order, shared = sort_by_prefix(batch.tokens, lengths)
    lengths, costs = lengths[order], costs[order]
    saved_per_token = np.array(
        [architecture.train_flops([length], 0, frozen=frozen) / length for length in lengths.tolist()]
    )
    best: tuple[float, list[list[NDArray[np.int64]]]] = math.inf, []
    total = int((lengths - shared).sum())
    passes = ranks * max(min_passes, -(-total // (budget * ranks)))
    for families_per_pass in _FAMILIES_PER_PASS:
        family = _find_families(lengths, shared, total / (passes * families_per_pass))
        common = np.where(np.diff(family, prepend=-1), 0, shared)
        shares = divide_documents(
            np.bincount(family, lengths - common).astype(np.int64),
            costs=np.bincount(family, costs - common * saved_per_token).astype(np.float64),
            ranks=ranks,
            budget=budget,
            min_passes=min_passes,
        )
        places = [[np.flatnonzero(np.isin(family, chosen)) for chosen in share] for share in shares]
        work = [
            [(costs[own] - select_shared(shared, own) * saved_per_token[own]).sum() for own in share]
            for share in places
        ]
        # Ranks wait for the costliest of each simultaneous pass.
        if (longest := float(np.max(work, axis=0).sum())) < best[0]:
            best = longest, places
    return [[order[own] for own in share] for share in best[1]]


_FAMILIES_PER_PASS = (1, 2, 4, 8, math.inf)


def _find_families(lengths: NDArray[np.int64], shared: NDArray[np.int64], limit: float) -> NDArray[np.int64]:
    """Return the family of each context, from 0 on, in the order of `sort_by_prefix`, shape [U].

    A family computes at most `limit` tokens, or is one context. A context that shares less than a quarter of its
    tokens begins a family, because the next group's prompt is a better place to divide at than the middle of a group.
    """
    family, number, tokens = np.zeros(len(lengths), dtype=np.int64), -1, 0
    for place, (length, common) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        tokens += length - common
        if number < 0 or tokens > limit or 4 * common < length:
            number, tokens = number + 1, length
        family[place] = number
    return family


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
        tokens: The number of tokens for which this rank has computed gradients since `begin`; shared ones count once.
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
                    self.tokens += int(micro_batch.computed.sum())
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
    reference: EndpointOwner, batch: TrainBatch, settings: TrainerSettings
) -> NDArray[np.float32]:
    """Return the log-probability of each loss token under the reference policy, shape [T].

    The contexts are divided over the serving replicas such that each gets about as much work.
    """
    replicas = max(1, getattr(reference, "serving", 1))  # a local object is its own only replica
    architecture = architecture_at(Path(settings.model_path))
    shares = divide_contexts(
        with_shared_prefixes(batch, architecture) if settings.config.shares_prefixes else batch,
        architecture,
        ranks=replicas,
        budget=int(batch.lengths.sum()),
    )
    parts = [np.flatnonzero(np.isin(batch.context, contexts)) for (contexts,) in shares if len(contexts)]
    replies = await asyncio.gather(*(reference.logprobs.route(batch.take(tokens)) for tokens in parts))
    logprobs = np.empty(len(batch), dtype=np.float32)
    for tokens, reply in zip(parts, replies, strict=True):
        logprobs[tokens] = reply
    return logprobs
