"""Reward functions: found by their dotted path, called, checked, and several made one."""

import asyncio
import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from rl_bridge.errors import ConfigError, RewardError

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


class VoteRule(StrEnum):
    """How votes become a reward."""

    MEAN = "mean"
    """The weighted mean."""
    MAJORITY = "majority"
    """1 where those above 0.5 weigh more than the others, 0 where they weigh less; nobody can say of a tie."""
    MIN = "min"
    """The lowest: one verifier that is not convinced is enough."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Ensemble:
    """Who votes, and how votes are counted.

    Attributes:
        functions: Dotted paths of reward functions.
        weights: Of the votes, one a function; all equal where it is empty.
        rule: How votes become a reward.
        quorum: The share of the weight that has to have voted. With less nobody can say.

    Raises:
        ConfigError: A value that cannot be.
    """

    functions: tuple[str, ...]
    weights: tuple[float, ...] = ()
    rule: VoteRule = VoteRule.MEAN
    quorum: float = 0.5

    def __post_init__(self) -> None:
        if not self.functions:
            raise ConfigError("expected at least one reward function, got none")
        if self.weights and len(self.weights) != len(self.functions):
            raise ConfigError(
                f"expected a weight for each of {len(self.functions)} reward functions, got {len(self.weights)}"
            )
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise ConfigError(f"expected weights above 0, got {list(self.weights)}")
        if not 0 <= self.quorum <= 1:
            raise ConfigError(f"expected a quorum from 0 to 1, got {self.quorum:g}")

    def reward(self, votes: Sequence[float | None]) -> float | None:
        """Count votes.

        A verifier without a vote is left out: of the mean, of the majority, of everything but the quorum.

        Args:
            votes: One a function, shape [F]; None from one that could not say.

        Returns:
            The reward; None where nobody can say.
        """
        weights = self.weights or (1.0,) * len(self.functions)
        cast = [(vote, weight) for vote, weight in zip(votes, weights, strict=True) if vote is not None]
        weight_cast, wanted = sum(weight for _, weight in cast), self.quorum * sum(weights)
        # No sum is compared to the last bit: half of 0.3, 0.1 and 0.2 is a little more than 0.3, and 0.1 and 0.2 weigh
        # a little more than 0.3, which is no majority.
        if not cast or (weight_cast < wanted and not math.isclose(weight_cast, wanted)):
            return None
        if self.rule is VoteRule.MEAN:
            return sum(vote * weight for vote, weight in cast) / weight_cast
        if self.rule is VoteRule.MIN:
            return min(vote for vote, _ in cast)
        pro = sum(weight for vote, weight in cast if vote > YES)
        contra = sum(weight for vote, weight in cast if vote <= YES)
        return None if math.isclose(pro, contra) else float(pro > contra)

    async def evaluate(self, vote: Callable[[int], Awaitable[float | None]]) -> float | None:
        """Have every function vote, all at once, and count.

        Args:
            vote: Asks the function of an index.

        Raises:
            Exception: What the first of those that failed raised, when all have ended.
        """
        votes: list[Any] = await asyncio.gather(
            *(vote(index) for index in range(len(self.functions))), return_exceptions=True
        )
        for outcome in votes:
            if isinstance(outcome, BaseException):
                raise outcome
        return self.reward(votes)
