"""How much better than its siblings a trajectory did, and what it pays for coming near the greatest length."""

from collections.abc import Sequence

import numpy as np

from rl_bridge.types import Group

STD_EPSILON = 1e-6
"""Keeps the division finite; a group without variance has advantages of zero either way."""


def group_advantages(rewards: Sequence[float], *, normalize_std: bool) -> list[float]:
    """Rewards of one group, relative to the group's mean.

    With `normalize_std`: (r - mean) / (std + eps), GRPO, arXiv 2402.03300, section 4.1.2.
    Without: r - mean, Dr. GRPO, arXiv 2503.20783, which shows that the division favours groups whose
    rewards hardly differ. std is the population's (divided by G). A sibling without a reward is left out beforehand:
    it is no 0.

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


def has_variance(rewards: Sequence[float]) -> bool:
    """True where the rewards of a group differ, so that the group carries a gradient."""
    return len(rewards) > 0 and max(rewards) > min(rewards)


NO_VARIANCE = "rewards without variance"


def without_variance(group: Group, rewards: Sequence[float]) -> str | None:
    """Refuse a group whose rewards are all equal, as its advantages are 0: dynamic sampling, DAPO, arXiv 2503.14476.

    See `rl_bridge.algorithms.functions.FilterFunction`.
    """
    return None if has_variance(rewards) else NO_VARIANCE


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """0 up to max_length - buffer, falling linearly to -1 at max_length, -1 beyond.

    The soft overlong punishment of DAPO, arXiv 2503.14476, equation 13; it is added to the reward.

    Args:
        length: Tokens that the policy produced.
        max_length: The most that it can.
        buffer: Tokens before that over which the penalty grows, from 1.
    """
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))
