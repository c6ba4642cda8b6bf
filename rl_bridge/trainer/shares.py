"""A batch, divided into updates, ranks and passes."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rl_bridge.algorithms.policy_loss import token_weights
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.buffer.packing import share_out
from rl_bridge.trainer.settings import TrainerSettings
from rl_bridge.types import PolicyVersion


@dataclass(kw_only=True, slots=True, frozen=True)
class RankBatch:
    """What one rank works on in one iteration. All ranks make the same number of passes, some of them idle.

    Attributes:
        batch: Its loss tokens, of all updates.
        updates: The passes of each update: indices of loss tokens in `batch`, none of an idle pass.
        sizes: Loss tokens of each update, over all ranks.
    """

    batch: TrainBatch
    updates: tuple[tuple[NDArray[np.int64], ...], ...]
    sizes: tuple[int, ...]


def rank_batches(
    batch: TrainBatch, settings: TrainerSettings, *, version: PolicyVersion, ranks: int
) -> list[RankBatch]:
    """Divide a batch: by trajectory into updates, by context into passes of about as many tokens each.

    Tensor-parallel ranks work on the same part.

    Args:
        batch: All of an iteration's loss tokens.
        settings: The sizes of passes, the number of updates, the aggregation.
        version: The iteration, which decides with the run's seed what is in which update.
        ranks: Of the trainer.

    Returns:
        One a rank, in their order.
    """
    config, algorithm = settings.trainer, settings.algorithm
    shuffle = np.random.default_rng([settings.seed, version])
    parts = batch.split_by_trajectory(config.updates_per_iteration, shuffle)
    weights = np.zeros(len(batch), dtype=np.float32)
    data_ranks = ranks // config.tensor_parallel
    tokens: list[list[list[NDArray[np.int64]]]] = [[] for _ in range(data_ranks)]
    for part in parts:
        weights[part] = token_weights(
            batch.trajectory[part], aggregation=algorithm.aggregation, max_length=settings.max_loss_tokens
        )
        contexts, place = np.unique(batch.context[part], return_inverse=True)
        shares = share_out(
            batch.lengths[contexts],
            ranks=data_ranks,
            budget=settings.tokens_per_pass,
            least_passes=config.gradient_accumulation_steps,
        )
        for rank, passes in enumerate(shares):
            tokens[rank].append([part[np.isin(place, documents)] for documents in passes])
    batch = replace(batch, weights=weights)
    sizes = tuple(map(len, parts))
    made = [_rank_batch(batch, updates, sizes) for updates in tokens]
    return [made[rank // config.tensor_parallel] for rank in range(ranks)]


def _rank_batch(
    batch: TrainBatch, updates: list[list[NDArray[np.int64]]], sizes: tuple[int, ...]
) -> RankBatch:
    own = np.sort(np.concatenate([tokens for passes in updates for tokens in passes]))
    return RankBatch(
        batch=batch.take(own),
        updates=tuple(tuple(np.searchsorted(own, tokens) for tokens in passes) for passes in updates),
        sizes=sizes,
    )
