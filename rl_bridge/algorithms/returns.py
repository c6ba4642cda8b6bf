"""A critic's part: advantages and returns from its values, and how far it is off."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STD_EPSILON = 1e-8


def generalized_advantages(
    rewards: NDArray[np.float32],
    values: NDArray[np.float32],
    sequences: NDArray[np.int64],
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """GAE, A_t = delta_t + gamma lambda A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t, and lambda-returns A + V.

    arXiv 1506.02438, equation 16. A step is one token of the policy's: what the environment says in between takes no
    time. After a sequence's last token there is nothing, so its value is 0.

    Args:
        rewards: What each token earned at once, shape [T].
        values: V of what each token was chosen from, shape [T].
        sequences: Which sequence each token belongs to, shape [T]; the tokens of one are in order, but need not be
            neighbours.
        gamma: The discount.
        gae_lambda: 0 gives delta_t, 1 the discounted return less the value.

    Returns:
        The advantages and the returns, each of shape [T].
    """
    order = np.argsort(sequences, kind="stable")
    owners, earned, known = sequences[order].tolist(), rewards[order].tolist(), values[order].tolist()
    found = [0.0] * len(order)
    advantage = next_value = 0.0
    owner = None
    for place in range(len(order) - 1, -1, -1):
        if owners[place] != owner:
            owner, advantage, next_value = owners[place], 0.0, 0.0
        delta = earned[place] + gamma * next_value - known[place]
        advantage = delta + gamma * gae_lambda * advantage
        found[place], next_value = advantage, known[place]
    advantages = np.empty(len(order))
    advantages[order] = found
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


def whitened(advantages: NDArray[np.float32]) -> NDArray[np.float32]:
    """(A - mean) / (std + eps), over all tokens of a batch, shape [T].

    Usual with PPO; which of its many details matter is the subject of arXiv 2006.05990.
    """
    values = advantages.astype(np.float64)
    result: NDArray[np.float32] = ((values - values.mean()) / (values.std() + STD_EPSILON)).astype(np.float32)
    return result


def penalised_rewards(
    rewards: NDArray[np.float32], divergence: NDArray[np.float32], *, coefficient: float
) -> NDArray[np.float32]:
    """r_t - beta KL_t: the divergence from the reference, paid where it is caused. arXiv 2203.02155, equation 2.

    Args:
        rewards: Shape [T].
        divergence: An estimate at each token, shape [T].
        coefficient: beta.
    """
    return rewards - np.float32(coefficient) * divergence


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None) -> Tensor:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2; without c the first alone.

    The clip is of the implementation that came with arXiv 1707.06347: a value does not go on moving away from what it
    was when the advantages were computed.

    Args:
        values: With gradient, shape [T].
        returns: What they should be, shape [T].
        old_values: What they were before the iteration's first update, shape [T].
        clip: c.

    Returns:
        Shape [T].
    """
    loss = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns).square())
    return 0.5 * loss
