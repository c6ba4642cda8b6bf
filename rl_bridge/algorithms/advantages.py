"""How much better than its siblings a trajectory did, and what it pays for coming near the greatest length."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STD_EPSILON = 1e-6
"""Keeps the division finite; a group without variance has advantages of zero either way."""


def group_advantages(rewards: Sequence[float], *, normalize_std: bool) -> list[float]:
    """Rewards of one group, relative to the group's mean.

    With `normalize_std`: (r - mean) / (std + eps), GRPO, arXiv 2402.03300, section 4.1.2.
    Without: r - mean, Dr. GRPO, arXiv 2503.20783, which shows that the division favours groups whose
    rewards hardly differ. std is the population's (divided by G).

    Args:
        rewards: One reward a sibling, shape [G].
        normalize_std: Whether to divide.

    Returns:
        One advantage a sibling, shape [G].

    Raises:
        ValueError: The group is empty.
    """
    if not len(rewards):
        raise ValueError("expected at least one reward in a group, got none")
    values = np.asarray(rewards, dtype=np.float64)
    centred = values - values.mean()
    if normalize_std:
        centred = centred / (values.std() + STD_EPSILON)
    return [float(value) for value in centred]


@dataclass(kw_only=True, slots=True, frozen=True)
class MaskedAdvantages:
    """Advantages of a batch in which some have no reward.

    Attributes:
        advantages: One a reward, shape [B]; 0 where there is none.
        mask: True where the advantage counts, shape [B]. A trajectory without is no part of the loss: neither of its
            sum nor of the number that the sum is divided by.
    """

    advantages: list[float]
    mask: list[bool]


def masked_advantages(
    rewards: Sequence[float | None], group_size: int, *, normalize_std: bool
) -> MaskedAdvantages:
    """Rewards of a batch, relative to the mean of those siblings that have one.

    None says that nothing is known of the policy: the infrastructure failed, or nobody could judge. It is not 0: it
    is left out of its group's mean and deviation, and of the loss. A reward without a scored sibling has nothing to
    be compared with, and is left out too.

    Args:
        rewards: Siblings one after another, shape [B].
        group_size: How many siblings there are of each, G; B is a multiple.
        normalize_std: As for `group_advantages`.

    Raises:
        ValueError: B is no multiple of G, or a reward is not finite.
    """
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"expected whole groups of {group_size} rewards, got {len(rewards)} rewards")
    advantages, mask = [0.0] * len(rewards), [False] * len(rewards)
    for first in range(0, len(rewards), group_size):
        scored = [
            (place, reward)
            for place, reward in enumerate(rewards[first : first + group_size], first)
            if reward is not None
        ]
        if wrong := [f"{reward} at {place}" for place, reward in scored if not math.isfinite(reward)]:
            raise ValueError(f"expected finite rewards, or None for those that are not known, got {wrong[0]}")
        if len(scored) < 2:
            continue
        relative = group_advantages([reward for _, reward in scored], normalize_std=normalize_std)
        for (place, _), advantage in zip(scored, relative, strict=True):
            advantages[place], mask[place] = advantage, True
    return MaskedAdvantages(advantages=advantages, mask=mask)


def has_variance(rewards: Sequence[float]) -> bool:
    """True where the rewards of a group differ, so that the group carries a gradient."""
    return len(rewards) > 0 and max(rewards) > min(rewards)


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """0 up to max_length - buffer, falling linearly to -1 at max_length, -1 beyond.

    The soft overlong punishment of DAPO, arXiv 2503.14476, equation 13; it is added to the reward.

    Args:
        length: Tokens that the policy produced.
        max_length: The most that it can.
        buffer: Tokens before that over which the penalty grows, from 1.
    """
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))
