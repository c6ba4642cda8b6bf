"""The policy's training: advantages of a batch before its first update, and the gradient of an update's loss."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_bridge.algorithms.advantages import generalized_advantages, penalized_rewards, whiten
from rl_bridge.algorithms.functions import load_advantage, load_loss
from rl_bridge.algorithms.policy_loss import (
    LossInputs,
    find_rejected,
    hold_then_anneal,
    kl_to_reference,
    sequence_means,
    token_weights,
)
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import AlgorithmConfig
from rl_bridge.trainer.metrics import LossMetrics
from rl_bridge.trainer.passes import ALL_UPDATES, Passes, RankBatch
from rl_bridge.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from rl_bridge.titan.model import TitanModel


def loss_settings(algorithm: AlgorithmConfig, *, progress: float) -> AlgorithmConfig:
    """Return `algorithm.*` with the loss's entropy and KL coefficients at `progress` through the run, in [0, 1]."""
    entropy_coef = hold_then_anneal(
        progress,
        value=algorithm.entropy_coef,
        hold=algorithm.entropy_hold,
        final_factor=algorithm.entropy_final_factor,
    )
    kl_coef = algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0
    return algorithm.model_copy(update={"entropy_coef": entropy_coef, "kl_coef": kl_coef})


def with_advantages(
    batch: TrainBatch,
    algorithm: AlgorithmConfig,
    *,
    values: NDArray[np.float32] | None = None,
    gather_values: Callable[[NDArray[np.generic]], NDArray[np.float64]],
) -> TrainBatch:
    """Return a rank's part of a batch with the advantages that it is trained with.

    Group-relative advantages are known when the batch is made, unless the divergence from the reference is part of the
    reward. GAE's follow from the critic's values. Both need whole trajectories, whose tokens may be on several ranks.

    Args:
        batch: The rank's part; with reference log-probabilities if the divergence is part of the reward.
        algorithm: The configuration.
        values: The critic's values, shape [T]; None without a critic.
        gather_values: Combines values of all ranks' loss tokens into those of the whole batch.
    """
    in_reward = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
    if values is None and not in_reward:
        return batch
    rewards = gather_values(_penalize(batch, algorithm) if in_reward else batch.rewards).astype(np.float32)
    trajectory = gather_values(batch.trajectory).astype(np.int64)
    if values is None:
        advantages_of_tokens = _group_advantages(rewards, trajectory, gather_values(batch.group), algorithm)
        return replace(batch, advantages=advantages_of_tokens[batch.index])
    advantages, returns = generalized_advantages(
        rewards,
        gather_values(values).astype(np.float32),
        trajectory,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
    )
    if algorithm.normalize_std:
        advantages = whiten(advantages)
    return replace(batch, advantages=advantages[batch.index], values=values, returns=returns[batch.index])


def _penalize(batch: TrainBatch, algorithm: AlgorithmConfig) -> NDArray[np.float32]:
    if batch.reference_logprobs is None:
        raise ValueError(
            f"kl_coef is {algorithm.kl_coef}, so reference log-probabilities are needed; got none"
        )
    divergence = kl_to_reference(
        torch.from_numpy(batch.old_logprobs),
        torch.from_numpy(batch.reference_logprobs),
        algorithm.kl_estimator,
    )
    return penalized_rewards(batch.rewards, divergence.numpy(), coefficient=algorithm.kl_coef)


def _group_advantages(
    rewards: NDArray[np.float32],
    trajectory: NDArray[np.int64],
    group: NDArray[np.float64],
    algorithm: AlgorithmConfig,
) -> NDArray[np.float32]:
    """Return each token's advantage: that of its trajectory's total reward relative to its group's."""
    _, first, index = np.unique(trajectory, return_index=True, return_inverse=True)
    totals, group = np.bincount(index, weights=rewards), group[first]
    trajectory_advantages, advantage = np.empty(len(totals)), load_advantage(algorithm.advantage_function)
    for group_id in np.unique(group):
        members = np.flatnonzero(group == group_id)
        trajectory_advantages[members] = advantage(
            totals[members].tolist(), normalize_std=algorithm.normalize_std
        )
    advantages: NDArray[np.float32] = trajectory_advantages[index].astype(np.float32)
    return advantages


class PolicyGradients:
    """Accumulates the gradient of the policy's loss over an update's passes on all ranks."""

    def __init__(self, model: "TitanModel", settings: TrainerSettings) -> None:
        self._model = model
        self._settings = settings
        self._loss = load_loss(settings.config.algorithm.loss)
        self.passes = Passes(model)

    def logprobs(self, rank_batch: RankBatch, *, updates: slice = ALL_UPDATES) -> NDArray[np.float32]:
        """Return the log-probability of each of this rank's loss tokens under the current weights; see `evaluate`."""

        def compute_logprobs(micro_batch: TrainBatch) -> Tensor:
            rows = self._model.pack(micro_batch)
            return self._model.outputs(rows, temperature=self._settings.config.rollout.temperature).logprobs

        return self.passes.evaluate(rank_batch, compute_logprobs, updates=updates)

    def with_proximal(self, rank_batch: RankBatch) -> RankBatch:
        """Add the log-probabilities under the weights before the first update, if ratios are relative to them.

        They are computed in the same passes in which each token is trained: in bfloat16 other passes round differently.
        The first update's tokens are left out, whose own passes have them.
        """
        if not self._settings.config.algorithm.recomputes_old or len(rank_batch.updates) == 1:
            return rank_batch
        logprobs = self.logprobs(rank_batch, updates=slice(1, None))
        return replace(rank_batch, batch=replace(rank_batch.batch, proximal_logprobs=logprobs))

    def reject_sequences(self, rank_batch: RankBatch) -> tuple[RankBatch, dict[str, float]]:
        """Give tokens of rejected trajectories a weight of 0, and the others the weights of a batch without them.

        See `find_rejected`. Returns the share of trajectories that are rejected too, by its name in the log.
        """
        algorithm, batch = self._settings.config.algorithm, rank_batch.batch
        if algorithm.sequence_rejection is None:
            return rank_batch, {}
        updates = np.zeros(len(batch), dtype=np.int64)
        for number, passes in enumerate(rank_batch.updates):
            for tokens in passes:
                updates[tokens] = number
        log_ratios = self.logprobs(rank_batch) - batch.old_logprobs
        gather = self.passes.gather_values
        trajectory = gather(batch, batch.trajectory).astype(np.int64)
        update = gather(batch, updates).astype(np.int64)
        rejected = find_rejected(gather(batch, log_ratios), trajectory, algorithm.sequence_rejection)
        weights = np.zeros(batch.total, dtype=np.float32)
        for number in range(len(rank_batch.updates)):
            kept = ~rejected & (update == number)
            weights[kept] = token_weights(
                trajectory[kept], aggregation=algorithm.aggregation, max_length=self._settings.max_loss_tokens
            )
        share = len(np.unique(trajectory[rejected])) / len(np.unique(trajectory))
        kept_batch = replace(batch, weights=weights[batch.index])
        return replace(rank_batch, batch=kept_batch), {"loss/rejected_share": share}

    def accumulate(
        self,
        rank_batch: RankBatch,
        update: int,
        settings: AlgorithmConfig,
        metrics: LossMetrics,
        *,
        fresh: int | None,
    ) -> float:
        """Accumulate the gradient of an update on each rank's part of the weights; returns the loss.

        Sequence-level ratios need forward passes of their own first, because a sequence's tokens may be in different
        passes; not where all of them are 1. `fresh` is the version of the trainer's weights, whose tokens show the
        engine's mismatch; None after the iteration's first update.
        """
        is_proximal = self._is_proximal(update)
        ratios = self._sequence_log_ratios(rank_batch, update)

        def loss(micro_batch: TrainBatch) -> Tensor:
            rows = self._model.pack(micro_batch)
            outputs = self._model.outputs(
                rows,
                temperature=self._settings.config.rollout.temperature,
                entropy_top_k=self._settings.config.algorithm.entropy_top_k,
            )
            assert outputs.entropy is not None
            assert micro_batch.weights is not None
            old_logprobs = self._to_tensor(micro_batch.old_logprobs)
            inputs = LossInputs(
                logprobs=outputs.logprobs,
                entropy=outputs.entropy,
                old_logprobs=old_logprobs,
                advantages=self._to_tensor(micro_batch.advantages),
                reference_logprobs=self._to_optional_tensor(micro_batch.reference_logprobs),
                proximal_logprobs=outputs.logprobs.detach()
                if is_proximal
                else self._to_optional_tensor(micro_batch.proximal_logprobs),
                sequence_log_ratios=None if ratios is None else self._to_tensor(ratios[micro_batch.index]),
            )
            per_token, loss_metrics = self._loss(inputs, settings)
            metrics.add({**loss_metrics, "policy/entropy": outputs.entropy.detach()})
            if fresh is not None:
                difference = outputs.logprobs.detach() - old_logprobs
                metrics.add_mismatch(difference, fresh=self._to_tensor(micro_batch.versions == fresh))
            metrics.add_rows(valid=rows.valid, padded=rows.tokens.size)
            return torch.sum(self._to_tensor(micro_batch.weights) * per_token)

        return self.passes.backward(rank_batch, update, loss)

    def _sequence_log_ratios(self, rank_batch: RankBatch, update: int) -> NDArray[np.float32] | None:
        """Return the sequence-level log-ratio of each token of the whole batch; None with token-level ratios."""
        if self._settings.config.algorithm.ratio == "token":
            return None
        batch = rank_batch.batch
        if self._is_proximal(update):
            return np.zeros(batch.total, dtype=np.float32)
        old_logprobs = batch.old_logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
        log_ratios = self.logprobs(rank_batch, updates=slice(update, update + 1)) - old_logprobs
        trajectory = self.passes.gather_values(batch, batch.trajectory).astype(np.int64)
        return sequence_means(self.passes.gather_values(batch, log_ratios), trajectory)

    def _is_proximal(self, update: int) -> bool:
        """Whether ratios are relative to the weights of this update, whose own passes compute log pi_old then."""
        return self._settings.config.algorithm.recomputes_old and update == 0

    def _to_tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._model.device)

    def _to_optional_tensor(self, values: NDArray[np.float32] | None) -> Tensor | None:
        return None if values is None else self._to_tensor(values)
