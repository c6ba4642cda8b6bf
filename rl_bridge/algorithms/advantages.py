"""Advantages of trajectories and tokens: relative to their group, or from a critic (GAE)."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_bridge.types import Group

STD_EPSILON = 1e-6
"""Keeps the division finite; the advantages of a group without variance are zero either way."""


def group_advantages(rewards: Sequence[float], *, normalize_std: bool) -> list[float]:
    """Return a group's rewards relative to their mean, shape [G].

    With `normalize_std`: (r - mean) / (std + eps), GRPO, arXiv 2402.03300, section 4.1.2. Without: r - mean, Dr. GRPO,
    arXiv 2503.20783, which shows that the division favours groups whose rewards hardly differ. std is the population's
    (divided by G). The caller leaves out siblings without a reward, which is not a reward of 0.

    Raises:
        ValueError: The group is empty.
    """
    if not len(rewards):
        raise ValueError("expected at least one reward in a group, got none")
    values = np.asarray(rewards, dtype=np.float64)
    # Divided by a power of two, which changes no digit: the squares of rewards from 1e154 on would overflow.
    exponent = max(0, int(np.frexp(np.abs(values).max())[1]))
    values = np.ldexp(values, -exponent)
    values -= values[0]  # equal rewards become 0; the mean of seven times 1e9 + 0.1 is not one of them
    centred = values - values.mean()
    if normalize_std:
        centred = centred / (values.std() + math.ldexp(STD_EPSILON, -exponent))
    else:
        centred = np.ldexp(centred, exponent)
    return [float(value) for value in centred]


def has_variance(rewards: Sequence[float]) -> bool:
    """Whether the rewards of siblings differ, so that they have a gradient."""
    return len(rewards) > 0 and max(rewards) > min(rewards)


def group_has_variance(group: Group, rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group's siblings differ, in self-play those of any seat, so that it has a gradient."""
    return any(has_variance([rewards[index] for index in indices]) for indices in group.indices_by_seat())


NO_VARIANCE = "rewards without variance"


def without_variance(group: Group, rewards: Sequence[float]) -> str | None:
    """Reject a group whose rewards, in self-play those of each seat, are all equal, as its advantages are 0.

    Dynamic sampling, DAPO, arXiv 2503.14476.

    See `rl_bridge.algorithms.functions.FilterFunction`.
    """
    return None if group_has_variance(group, rewards) else NO_VARIANCE


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """Return 0 up to a length of max_length - buffer policy tokens, falling linearly to -1 at max_length and beyond.

    The soft overlong punishment of DAPO, arXiv 2503.14476, equation 13; it is added to the reward.
    """
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))


WHITENING_EPSILON = 1e-8


def generalized_advantages(
    rewards: NDArray[np.float32],
    values: NDArray[np.float32],
    sequences: NDArray[np.int64],
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """GAE, A_t = delta_t + gamma lambda A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t, and lambda-returns A + V.

    arXiv 1506.02438, equation 16. A step is one token of the policy; the environment's tokens in between are not steps.
    The value after a sequence's last token is 0.

    Args:
        rewards: Immediate reward of each token, shape [T].
        values: V of the state in which each token was chosen, shape [T].
        sequences: Id of each token's sequence, shape [T]; the tokens of a sequence are in order, but need not be
            contiguous.
        gamma: The discount factor.
        gae_lambda: 0 gives delta_t, 1 the discounted return minus the value.

    Returns:
        The advantages and the returns, each of shape [T].
    """
    order = np.argsort(sequences, kind="stable")
    sequence_ids = sequences[order].tolist()
    ordered_rewards = rewards[order].tolist()
    ordered_values = values[order].tolist()
    ordered_advantages = [0.0] * len(order)
    advantage = next_value = 0.0
    sequence_id = None
    for index in range(len(order) - 1, -1, -1):
        if sequence_ids[index] != sequence_id:
            sequence_id, advantage, next_value = sequence_ids[index], 0.0, 0.0
        delta = ordered_rewards[index] + gamma * next_value - ordered_values[index]
        advantage = delta + gamma * gae_lambda * advantage
        ordered_advantages[index], next_value = advantage, ordered_values[index]
    advantages = np.empty(len(order))
    advantages[order] = ordered_advantages
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


def whiten(advantages: NDArray[np.float32]) -> NDArray[np.float32]:
    """(A - mean) / (std + eps), over all tokens of a batch, shape [T].

    Usual with PPO; which of its many details matter is the subject of arXiv 2006.05990.
    """
    values = advantages.astype(np.float64)
    result: NDArray[np.float32] = ((values - values.mean()) / (values.std() + WHITENING_EPSILON)).astype(
        np.float32
    )
    return result


def penalized_rewards(
    rewards: NDArray[np.float32], divergence: NDArray[np.float32], *, coefficient: float
) -> NDArray[np.float32]:
    """r_t - beta KL_t, each of shape [T]: each token pays for its own divergence. arXiv 2203.02155, equation 2."""
    return rewards - np.float32(coefficient) * divergence


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None) -> Tensor:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, each of shape [T]; without c only the first term.

    The clip comes from the implementation of arXiv 1707.06347: it keeps a value near the one before the iteration's
    first update, from which the advantages were computed.
    """
    loss = (values - returns).square()
    if clip is not None:
        clipped_values = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped_values - returns).square())
    return 0.5 * loss
