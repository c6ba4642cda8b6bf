"""Reward functions: found by their dotted path, checked, and the votes of several counted."""

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from rl_bridge.config.sections import RewardConfig
from rl_bridge.errors import RewardError

RewardFunction: TypeAlias = Callable[[Any, Any, Any], float | None]
"""`compute_reward(prompt, response, target)`: a number, or None where nobody can say."""

PARAMETERS = ("prompt", "response", "target")


def load_function(path: str) -> RewardFunction:
    """Import a reward function.

    Args:
        path: `package.module.function`.

    Raises:
        RewardError: There is none, or it cannot be called as a reward function is.
    """
    module_name, _, name = path.rpartition(".")
    if not (module_name and name):
        raise RewardError(f"expected a reward function as 'package.module.function', got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise RewardError(
            f"expected to import {module_name!r} for the reward function {path!r}, "
            f"got {type(error).__name__}: {error}; start the run where the module can be imported from"
        ) from error
    function = getattr(module, name, None)
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine function" if callable(function) else type(function).__name__
        raise RewardError(f"expected {path!r} to be a plain function, got {kind}")
    try:
        inspect.signature(function).bind(*PARAMETERS)
    except TypeError as error:
        raise RewardError(
            f"expected {path!r} to take prompt, response and target, got: {error}; "
            "write def compute_reward(prompt, response, target) -> float | None"
        ) from error
    except ValueError:
        pass  # written in C, without a signature that could be looked at
    return function  # type: ignore[no-any-return]


def checked_reward(path: str, value: object) -> float | None:
    """Return what a reward function returned, as a number or None.

    Raises:
        RewardError: It is neither, or not finite.
    """
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
"""A vote above it is a yes, where votes are counted."""


def count_votes(votes: Sequence[float | None], reward: RewardConfig) -> float | None:
    """Make one reward of the votes of several functions, as `reward.rule`, `.weights` and `.quorum` say.

    A function without a vote is left out: of the mean, of the majority, of everything but the quorum.

    Args:
        votes: One a function, shape [F]; None from one that could not say.
        reward: The configuration's.

    Returns:
        The reward; None where less than the quorum has voted, and at a tie.
    """
    weights = reward.weights or (1.0,) * len(votes)
    cast = [(vote, weight) for vote, weight in zip(votes, weights, strict=True) if vote is not None]
    weight_cast, wanted = sum(weight for _, weight in cast), reward.quorum * sum(weights)
    # No sum is compared to the last bit: half of 0.3, 0.1 and 0.2 is a little more than 0.3, and 0.1 and 0.2 weigh
    # a little more than 0.3, which is no majority.
    if not cast or (weight_cast < wanted and not math.isclose(weight_cast, wanted)):
        return None
    if reward.rule == "mean":
        return sum(vote * weight for vote, weight in cast) / weight_cast
    if reward.rule == "min":
        return min(vote for vote, _ in cast)
    pro = sum(weight for vote, weight in cast if vote > YES)
    contra = sum(weight for vote, weight in cast if vote <= YES)
    return None if math.isclose(pro, contra) else float(pro > contra)
