"""What a batch lacks before its first update: advantages that need a reference or a critic; and what the loss is."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from rl_bridge.algorithms.functions import load_advantage
from rl_bridge.algorithms.regularizers import held_then_annealed, kl_to_reference
from rl_bridge.algorithms.returns import generalized_advantages, penalised_rewards, whitened
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import AlgorithmConfig


def loss_settings(algorithm: AlgorithmConfig, *, progress: float) -> AlgorithmConfig:
    """`algorithm.*` at a point of the run: with the bonus for entropy of that, and what the divergence is in the loss.

    Args:
        algorithm: The configuration.
        progress: How much of the run is over, in [0, 1].
    """
    entropy_coef = held_then_annealed(
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
    whole: Callable[[NDArray[np.generic]], NDArray[np.float64]],
) -> TrainBatch:
    """A rank's part of a batch with the advantages that it is trained with.

    Those relative to the group are known when the batch is made, unless the divergence from the reference is a part of
    the reward. Those of GAE are known from the critic's values. Either is of whole trajectories, whose tokens may be on
    several ranks.

    Args:
        batch: With reference log-probabilities where the divergence is in the reward.
        algorithm: The configuration.
        values: The critic's, shape [T]; None without a critic.
        whole: Gives the whole batch's numbers for those of this part.

    Raises:
        ValueError: The reference log-probabilities are needed and not there.
    """
    in_reward = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
    if values is None and not in_reward:
        return batch
    rewards = whole(_penalised(batch, algorithm) if in_reward else batch.rewards).astype(np.float32)
    trajectory = whole(batch.trajectory).astype(np.int64)
    if values is None:
        relative = _relative(rewards, trajectory, whole(batch.group), algorithm)
        return replace(batch, advantages=relative[batch.index])
    advantages, returns = generalized_advantages(
        rewards,
        whole(values).astype(np.float32),
        trajectory,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
    )
    if algorithm.normalize_std:
        advantages = whitened(advantages)
    return replace(batch, advantages=advantages[batch.index], values=values, returns=returns[batch.index])


def _penalised(batch: TrainBatch, algorithm: AlgorithmConfig) -> NDArray[np.float32]:
    if batch.reference_logprobs is None:
        raise ValueError(
            f"kl_coef is {algorithm.kl_coef}, so reference log-probabilities are needed; got none"
        )
    divergence = kl_to_reference(
        torch.from_numpy(batch.old_logprobs),
        torch.from_numpy(batch.reference_logprobs),
        algorithm.kl_estimator,
    )
    return penalised_rewards(batch.rewards, divergence.numpy(), coefficient=algorithm.kl_coef)


def _relative(
    rewards: NDArray[np.float32],
    trajectory: NDArray[np.int64],
    group: NDArray[np.float64],
    algorithm: AlgorithmConfig,
) -> NDArray[np.float32]:
    """Each trajectory's sum of rewards, beside its group's."""
    _, first, index = np.unique(trajectory, return_index=True, return_inverse=True)
    totals, group = np.bincount(index, weights=rewards), group[first]
    relative, advantage = np.empty(len(totals)), load_advantage(algorithm.advantage_function)
    for one in np.unique(group):
        members = np.flatnonzero(group == one)
        relative[members] = advantage(totals[members].tolist(), normalize_std=algorithm.normalize_std)
    advantages: NDArray[np.float32] = relative[index].astype(np.float32)
    return advantages
