"""Exact returns of any policy, and the exact optimum, of the BlackJack game that this environment serves.

Nothing is sampled. With every ace counted as one, the sum of a hand only grows, so the decision states form
an acyclic graph: one backward sweep gives the optimal action values (Sutton and Barto, 2018, section 4.4,
where a single sweep is enough for want of cycles) and one forward sweep gives the visits, and with them the
exact return of any policy. Results are in double precision. Pure Python: imports :mod:`.odds` and nothing
else of the project, so it can score a policy wherever that policy lives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from .odds import (
    BUST,
    DECISION_STATES,
    DEFAULT_RULES,
    STATES_BY_LOW_SUM,
    DecisionState,
    Ending,
    Rules,
    deal_distribution,
    standing,
    standing_natural,
    successors,
)

__all__ = [
    "DECISION_STATES",
    "ActionValues",
    "Agreement",
    "Answer",
    "Choice",
    "DecisionState",
    "Evaluation",
    "Policy",
    "Rules",
    "action_values",
    "agreement",
    "choice_at",
    "evaluate",
    "optimal_policy",
    "optimal_return",
]

Answer: TypeAlias = Literal["hit", "stand"] | None
"""What a policy says at a state; None stands for an illegal or unreadable answer."""


Choice: TypeAlias = Answer | Mapping[Answer, float]
"""An answer, or the probability of each answer."""

Policy: TypeAlias = (
    Callable[[int, bool, int], Choice]
    | Mapping[DecisionState, Choice]
    | Mapping[tuple[int, bool, int], Choice]
)
"""A function of (total, usable_ace, dealer), or a mapping from such triples."""


@dataclass(frozen=True)
class Evaluation:
    """Exact statistics of one policy. Returns are per hand, in bets.

    Attributes:
        mean_return: the expected return.
        variance: the variance of one hand's return; divide by n for that of a mean over n hands.
        win: probability that the hand is won; with push, loss and illegal it sums to 1.
        push: probability of a draw.
        loss: probability that the hand is lost by play.
        illegal: probability that the hand ends in an illegal answer.
        visits: expected number of decisions at each state in a hand, for the states with a non-zero one.
    """

    mean_return: float
    variance: float
    win: float
    push: float
    loss: float
    illegal: float
    visits: Mapping[DecisionState, float]


class ActionValues(NamedTuple):
    """Expected returns of the two actions at a state, optimal play following."""

    stand: float
    hit: float


@dataclass(frozen=True)
class Agreement:
    """How often a policy answers as the optimum does; illegal answers never agree.

    Attributes:
        unweighted: mean over all of :data:`DECISION_STATES`, each counted once.
        weighted: mean over the decisions that the policy itself meets in play.
    """

    unweighted: float
    weighted: float


@cache
def action_values() -> Mapping[DecisionState, ActionValues]:
    """Optimal action values of all decision states, for hands that are not a natural as dealt.

    The payout of a natural does not touch them: it only raises the value of standing on one, which is the
    best action without it, since no hand beats 21.
    """
    values: dict[DecisionState, ActionValues] = {}
    for state in reversed(STATES_BY_LOW_SUM):
        reached, bust = successors(state)
        hit = math.fsum([-bust, *(p * max(values[after]) for after, p in reached)])
        values[state] = ActionValues(stand=standing(state.total, state.dealer).mean, hit=hit)
    return MappingProxyType(values)


@cache
def optimal_policy() -> Mapping[DecisionState, Literal["hit", "stand"]]:
    """The best action of every decision state: basic strategy without doubling, splitting or surrender.

    It is the same under all :class:`Rules` (see :func:`action_values`).
    """
    best: dict[DecisionState, Literal["hit", "stand"]] = {
        state: "hit" if value.hit > value.stand else "stand" for state, value in action_values().items()
    }
    return MappingProxyType(best)


def optimal_return(rules: Rules = DEFAULT_RULES) -> float:
    """The expected return of optimal play, from the backward sweep."""
    values = action_values()
    return math.fsum(
        chance * (standing_natural(s.dealer, rules).mean if s[:2] == (21, True) else max(values[s]))
        for s, chance in deal_distribution().items()
    )


def choice_at(policy: Policy, state: DecisionState) -> Mapping[Answer, float]:
    """Asks a policy at one state.

    Returns:
        The probability of each answer it may give.

    Raises:
        ValueError: the policy has nothing for the state, gives another answer than "hit", "stand" or None,
            or probabilities that are negative or do not sum to 1.
    """
    where = f"{'soft' if state.usable_ace else 'hard'} {state.total} against {state.dealer}"
    if isinstance(policy, Mapping):
        if state not in policy:
            raise ValueError(f"expected an answer for {where}, found none; say None if it is illegal")
        choice = policy[state]
    else:
        choice = policy(*state)
    asked = tuple(choice.items()) if isinstance(choice, Mapping) else ((choice, 1.0),)
    for answer, chance in asked:
        if answer not in ("hit", "stand", None):
            raise ValueError(f"expected 'hit', 'stand' or None at {where}, got {answer!r}")
        if not chance >= 0.0:
            raise ValueError(f"expected a probability >= 0 for {answer!r} at {where}, got {chance!r}")
    total = math.fsum(chance for _, chance in asked)
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise ValueError(f"expected probabilities that sum to 1 at {where}, got {total!r}")
    return dict(asked)


def evaluate(policy: Policy, *, rules: Rules = DEFAULT_RULES, illegal_return: float = -1.0) -> Evaluation:
    """Computes a policy's exact statistics by one forward sweep over the decision states.

    Args:
        policy: deterministic or stochastic. It is asked once for each state that it can reach.
        rules: the payout of naturals.
        illegal_return: credited to a hand that an illegal answer (None) ends.

    Raises:
        ValueError: see :func:`choice_at`.
    """
    visits = dict(deal_distribution())
    endings: list[tuple[float, Ending]] = []
    illegal = 0.0
    for state in STATES_BY_LOW_SUM:
        here = visits.get(state, 0.0)
        if here == 0.0:
            continue
        chances = choice_at(policy, state)
        illegal += here * chances.get(None, 0.0)
        stand = chances.get("stand", 0.0)
        dealt = deal_distribution().get(state, 0.0) if state[:2] == (21, True) else 0.0
        endings.append((dealt * stand, standing_natural(state.dealer, rules)))
        endings.append(((here - dealt) * stand, standing(state.total, state.dealer)))
        hit = here * chances.get("hit", 0.0)
        if hit > 0.0:
            reached, bust = successors(state)
            endings.append((hit * bust, BUST))
            for after, probability in reached:
                visits[after] = visits.get(after, 0.0) + hit * probability
    win, push, loss, mean, square = (
        math.fsum(chance * ending[i] for chance, ending in endings) for i in range(5)
    )
    mean += illegal * illegal_return
    square += illegal * illegal_return**2
    return Evaluation(mean, square - mean**2, win, push, loss, illegal, MappingProxyType(visits))


def agreement(policy: Policy) -> Agreement:
    """Compares a policy, asked at all decision states, with the optimum.

    Raises:
        ValueError: see :func:`choice_at`.
    """
    answers = {state: choice_at(policy, state) for state in DECISION_STATES}
    visits = evaluate(answers).visits
    agrees = {state: answers[state].get(best, 0.0) for state, best in optimal_policy().items()}
    met = math.fsum(visits.values())
    return Agreement(
        unweighted=math.fsum(agrees.values()) / len(agrees),
        weighted=math.fsum(chance * agrees[s] for s, chance in visits.items()) / met,
    )
