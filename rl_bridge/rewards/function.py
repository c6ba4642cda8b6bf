"""Importing and checking reward functions, and counting the votes of several."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from rl_bridge.config import RewardConfig, resolve_function
from rl_bridge.errors import RewardError

RewardFunction: TypeAlias = Callable[[Any, Any, Any], float | None]
"""`compute_reward(prompt, response, target)`: a number, or None if it cannot tell."""


def load_function(path: str) -> RewardFunction:
    """Import a reward function, `package.module.function` or `package.module:function`; ConfigError if it fails."""
    reference = path if ":" in path else ":".join(path.rsplit(".", 1))
    signature = "(prompt, response, target) -> float | None"
    return resolve_function(reference, key="reward.function", signature=signature, args=(None, "", None))


def check_reward(path: str, value: object) -> float | None:
    """Convert a reward function's result to a float or None; RewardError if it is neither, or not finite."""
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]  # numbers of numpy and torch convert too
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"expected {path!r} to return a finite number or None, got {value!r:.200}")
    return number


YES = 0.5
"""A vote above it counts as a yes for a majority."""


def count_votes(votes: Sequence[float | None], reward: RewardConfig) -> float | None:
    """Combine the votes of several functions into a reward, by `reward.rule`, `.weights` and `.quorum`.

    A function without a vote counts only for the quorum.

    Args:
        votes: One per function, shape [F]; None from a function that could not tell.
        reward: The configuration.

    Returns:
        The reward; None if less than the quorum has voted, and at a tie.
    """
    weights = reward.weights or (1.0,) * len(votes)
    cast = [(vote, weight) for vote, weight in zip(votes, weights, strict=True) if vote is not None]
    weight_cast, required_weight = sum(weight for _, weight in cast), reward.quorum * sum(weights)
    # Sums are compared with a tolerance: in floating point, half of 0.3 + 0.1 + 0.2 is a little more than 0.3, and
    # 0.1 + 0.2 a little more than 0.3, which is not a majority.
    if not cast or (weight_cast < required_weight and not math.isclose(weight_cast, required_weight)):
        return None
    if reward.rule == "mean":
        return sum(vote * weight for vote, weight in cast) / weight_cast
    if reward.rule == "min":
        return min(vote for vote, _ in cast)
    pro = sum(weight for vote, weight in cast if vote > YES)
    contra = sum(weight for vote, weight in cast if vote <= YES)
    return None if math.isclose(pro, contra) else float(pro > contra)
