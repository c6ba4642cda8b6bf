"""A reward function that adds nothing: with it, every episode depends on the reward pool."""

from typing import Any


def compute_reward(prompt: Any, response: str, target: Any) -> float:
    """Return 0: the game's own reward stands."""
    return 0.0
