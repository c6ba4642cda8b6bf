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
    """Combine the votes of several functions into a reward, by `reward.rule` and `.quorum`.

    Args:
        votes: One per function, shape [F]; None from a function that could not tell, which only the quorum counts.
        reward: The configuration.

    Returns:
        The reward; None if less than the quorum has voted, and at a tie.
    """
    cast = [vote for vote in votes if vote is not None]
    if not cast or len(cast) < reward.quorum * len(votes):
        return None
    if reward.rule == "mean":
        return sum(cast) / len(cast)
    pro = sum(vote > YES for vote in cast)
    return None if 2 * pro == len(cast) else float(2 * pro > len(cast))
