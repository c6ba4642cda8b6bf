"""A reward function that changes nothing: it keeps the reward pool in the way of every episode."""

from typing import Any


def compute_reward(prompt: Any, response: str, target: Any) -> float:
    """Nothing on top of what the table pays."""
    return 0.0
