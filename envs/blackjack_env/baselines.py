"""Baseline policies for BlackJack, with their exact returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from .oracle import (
    DEFAULT_RULES,
    HARD_TOTALS,
    SOFT_TOTALS,
    Choice,
    Evaluation,
    Policy,
    Rules,
    evaluate,
    optimal_policy,
)


@dataclass(frozen=True)
class Baseline:
    """A named policy and its exact evaluation."""

    title: str
    policy: Policy
    evaluation: Evaluation


@dataclass(frozen=True)
class ThresholdRule:
    """A :data:`.oracle.Policy` that hits below a threshold and ignores the dealer's upcard.

    Attributes:
        hard: the lowest hard total to stand on.
        soft: the lowest soft total to stand on.
    """

    hard: int
    soft: int

    def __call__(self, total: int, usable_ace: bool, dealer: int) -> Choice:
        """Return the action for a state."""
        return "hit" if total < (self.soft if usable_ace else self.hard) else "stand"


def always_stand(total: int, usable_ace: bool, dealer: int) -> Choice:
    """Stand on every total."""
    return "stand"


def always_hit(total: int, usable_ace: bool, dealer: int) -> Choice:
    """Hit until the hand busts."""
    return "hit"


def random_policy(total: int, usable_ace: bool, dealer: int) -> Choice:
    """Hit or stand with equal probability."""
    return {"hit": 0.5, "stand": 0.5}


def hit_below(total: int) -> ThresholdRule:
    """Return the rule that hits every hand, hard or soft, below `total`."""
    return ThresholdRule(hard=total, soft=total)


@lru_cache(maxsize=8)
def best_threshold_rule(rules: Rules = DEFAULT_RULES) -> ThresholdRule:
    """Try every pair of thresholds and return the rule with the highest exact return."""
    candidates = (
        ThresholdRule(hard, soft)
        for hard in range(HARD_TOTALS.start, HARD_TOTALS.stop + 1)
        for soft in range(SOFT_TOTALS.start, SOFT_TOTALS.stop + 1)
    )
    return max(candidates, key=lambda rule: evaluate(rule, rules=rules).mean_return)


@lru_cache(maxsize=8)
def baselines(rules: Rules = DEFAULT_RULES) -> Mapping[str, Baseline]:
    """Return all baselines by key, ordered from the weakest to the optimum."""
    blind = best_threshold_rule(rules)
    policies: dict[str, tuple[str, Policy]] = {
        "random": ("random", random_policy),
        "always_stand": ("always stand", always_stand),
        "hit_below_17": ("hit below 17", hit_below(17)),
        "best_blind": (f"best dealer-blind rule (hard < {blind.hard}, soft < {blind.soft})", blind),
        "basic_strategy": ("basic strategy (optimum)", optimal_policy()),
    }
    return MappingProxyType(
        {
            key: Baseline(title, policy, evaluate(policy, rules=rules))
            for key, (title, policy) in policies.items()
        }
    )
