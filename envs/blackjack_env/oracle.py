"""Exact outcome probabilities and returns of any policy, and the optimal policy, for this environment's BlackJack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

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


class DecisionState(NamedTuple):
    """Everything a player's decision depends on. Equal to, and hashes like, a plain tuple of the same values.

    Attributes:
        total: the hand's value, with an ace counted as 11 if that does not bust.
        usable_ace: whether an ace is counted as 11 ("soft").
        dealer: the dealer's upcard, 1 (ace) to 10.
    """

    total: int
    usable_ace: bool
    dealer: int


CARDS = {card: 4 / 13 if card == 10 else 1 / 13 for card in range(1, 11)}
DEALER_CARDS = range(1, 11)
HARD_TOTALS = range(4, 22)
SOFT_TOTALS = range(12, 22)
DECISION_STATES: tuple[DecisionState, ...] = tuple(
    DecisionState(total, soft, dealer)
    for soft, totals in ((False, HARD_TOTALS), (True, SOFT_TOTALS))
    for total in totals
    for dealer in DEALER_CARDS
)
"""Every state in which the player can decide: 18 hard and 10 soft totals, each against 10 upcards."""


@dataclass(frozen=True)
class Rules:
    """The two options of Gymnasium's game. Both concern a natural: an ace and a ten in the first two cards.

    Attributes:
        natural: a natural that beats the dealer pays 1.5. It still only draws against any other 21.
        sab: Sutton and Barto's rule: a natural beats everything except another natural, and pays 1.
            Takes precedence over `natural`.
    """

    natural: bool = False
    sab: bool = False


DEFAULT_RULES = Rules()


class _Ending(NamedTuple):
    """Outcome probabilities from some point in a hand, with the mean return and mean squared return, in bets."""

    win: float
    push: float
    loss: float
    mean: float
    square: float


_BUST = _Ending(win=0.0, push=0.0, loss=1.0, mean=-1.0, square=1.0)


def _add_card(total: int, usable_ace: bool, card: int) -> tuple[int, bool]:
    """Return (total, usable_ace) of a hand after one more card (1 to 10). A total above 21 is a bust."""
    low = total - 10 if usable_ace else total
    has_ace = usable_ace or card == 1
    # Once an ace had to be counted as 1, `low` is at least 12, so it is never counted as 11 again.
    if has_ace and low + card <= 11:
        return low + card + 10, True
    return low + card, False


@cache
def dealer_distribution(upcard: int) -> Mapping[int, float]:
    """Return the probability of each final total of the dealer (17 to 21, a bust as 22) given the upcard (1 to 10)."""
    final = dict.fromkeys(range(17, 23), 0.0)

    def draw(total: int, soft: bool, chance: float) -> None:
        if total >= 17:
            final[min(total, 22)] += chance
            return
        for card, probability in CARDS.items():
            draw(*_add_card(total, soft, card), chance * probability)

    # The hole card is simply the next draw: no upcard reaches 17 by itself.
    draw(*_add_card(0, False, upcard), 1.0)
    return MappingProxyType(final)


@cache
def _settle_stand(total: int, dealer: int) -> _Ending:
    """Return the outcome of standing on a total (4 to 21) against an upcard, without bonuses for naturals."""
    final = dealer_distribution(dealer)
    win = math.fsum(p for end, p in final.items() if end > 21 or end < total)
    push = final.get(total, 0.0)
    loss = 1.0 - win - push
    return _Ending(win, push, loss, mean=win - loss, square=win + loss)


@cache
def _standing_natural(dealer: int, rules: Rules) -> _Ending:
    """Return the outcome of standing on a natural against an upcard."""
    ending = _settle_stand(21, dealer)
    if rules.sab:
        push = {1: CARDS[10], 10: CARDS[1]}.get(dealer, 0.0)
        return _Ending(1.0 - push, push, loss=0.0, mean=1.0 - push, square=1.0 - push)
    if rules.natural:
        return ending._replace(mean=1.5 * ending.win, square=2.25 * ending.win)
    return ending


def _minimum_total(state: DecisionState) -> int:
    return state.total - 10 if state.usable_ace else state.total


@cache
def successors(state: DecisionState) -> tuple[tuple[tuple[DecisionState, float], ...], float]:
    """Return the states that can follow a hit with their probabilities, and the probability of a bust."""
    successor_chances: dict[DecisionState, float] = {}
    bust = 0.0
    for card, probability in CARDS.items():
        total, soft = _add_card(state.total, state.usable_ace, card)
        if total > 21:
            bust += probability
        else:
            after = DecisionState(total, soft, state.dealer)
            successor_chances[after] = successor_chances.get(after, 0.0) + probability
    return tuple(successor_chances.items()), bust


@cache
def deal_distribution() -> Mapping[DecisionState, float]:
    """Return the probability of each initial state. An initial soft 21 is always a natural."""
    dealt: dict[DecisionState, float] = {}
    for dealer, upcard in CARDS.items():
        for first, first_chance in CARDS.items():
            for second, second_chance in CARDS.items():
                total, soft = _add_card(*_add_card(0, False, first), second)
                state = DecisionState(total, soft, dealer)
                dealt[state] = dealt.get(state, 0.0) + upcard * first_chance * second_chance
    return MappingProxyType(dealt)


STATES_BY_LOW_SUM = tuple(sorted(DECISION_STATES, key=_minimum_total))
"""The decision states, ordered so that a hit always leads to a later one."""


Answer: TypeAlias = Literal["hit", "stand"] | None
"""A policy's answer at a state. None stands for an illegal or unreadable answer."""


Choice: TypeAlias = Answer | Mapping[Answer, float]
"""A single answer, or the probability of each answer."""

Policy: TypeAlias = (
    Callable[[int, bool, int], Choice]
    | Mapping[DecisionState, Choice]
    | Mapping[tuple[int, bool, int], Choice]
)
"""A function of (total, usable_ace, dealer), or a mapping keyed by such triples."""


@dataclass(frozen=True)
class Evaluation:
    """Exact statistics of one policy. Returns are per hand, in bets.

    Attributes:
        mean_return: the expected return.
        variance: the variance of one hand's return. The mean over n hands has this variance divided by n.
        win: the probability of a win. win, push, loss and illegal sum to 1.
        push: the probability of a draw.
        loss: the probability of losing by play.
        illegal: the probability that the hand ends with an illegal answer.
        visits: the expected number of decisions per hand in each state, for states where it is not zero.
    """

    mean_return: float
    variance: float
    win: float
    push: float
    loss: float
    illegal: float
    visits: Mapping[DecisionState, float]


class ActionValues(NamedTuple):
    """Expected returns of the two actions at a state if play is optimal afterwards."""

    stand: float
    hit: float


@dataclass(frozen=True)
class Agreement:
    """How often a policy agrees with the optimal policy. Illegal answers never agree.

    Attributes:
        unweighted: mean over :data:`DECISION_STATES`, each counted once.
        weighted: mean over states, weighted by how often the policy visits them in play.
    """

    unweighted: float
    weighted: float


@cache
def action_values() -> Mapping[DecisionState, ActionValues]:
    """Return the optimal action values of all decision states, for hands that are not naturals.

    The payout of a natural does not affect them: it only raises the value of standing on one, which is already
    the best action because no hand beats 21.
    """
    values: dict[DecisionState, ActionValues] = {}
    for state in reversed(STATES_BY_LOW_SUM):
        successor_chances, bust = successors(state)
        hit = math.fsum([-bust, *(p * max(values[after]) for after, p in successor_chances)])
        values[state] = ActionValues(stand=_settle_stand(state.total, state.dealer).mean, hit=hit)
    return MappingProxyType(values)


@cache
def optimal_policy() -> Mapping[DecisionState, Literal["hit", "stand"]]:
    """Return the best action in every decision state: basic strategy without doubling, splitting or surrender.

    It is the same under all :class:`Rules` (see :func:`action_values`).
    """
    best: dict[DecisionState, Literal["hit", "stand"]] = {
        state: "hit" if value.hit > value.stand else "stand" for state, value in action_values().items()
    }
    return MappingProxyType(best)


def optimal_return(rules: Rules = DEFAULT_RULES) -> float:
    """Return the expected return of optimal play, computed by backward induction."""
    values = action_values()
    return math.fsum(
        chance * (_standing_natural(s.dealer, rules).mean if s[:2] == (21, True) else max(values[s]))
        for s, chance in deal_distribution().items()
    )


def choice_at(policy: Policy, state: DecisionState) -> Mapping[Answer, float]:
    """Return the probability of each answer that a policy gives at one state.

    Raises:
        ValueError: the policy has no entry for the state, an answer is not "hit", "stand" or None, or the
            probabilities are negative or do not sum to 1.
    """
    where = f"{'soft' if state.usable_ace else 'hard'} {state.total} against {state.dealer}"
    if isinstance(policy, Mapping):
        if state not in policy:
            raise ValueError(f"expected an answer for {where}, found none; say None if it is illegal")
        choice = policy[state]
    else:
        choice = policy(*state)
    answers = tuple(choice.items()) if isinstance(choice, Mapping) else ((choice, 1.0),)
    for answer, chance in answers:
        if answer not in ("hit", "stand", None):
            raise ValueError(f"expected 'hit', 'stand' or None at {where}, got {answer!r}")
        if not chance >= 0.0:
            raise ValueError(f"expected a probability >= 0 for {answer!r} at {where}, got {chance!r}")
    total = math.fsum(chance for _, chance in answers)
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise ValueError(f"expected probabilities that sum to 1 at {where}, got {total!r}")
    return dict(answers)


def evaluate(policy: Policy, *, rules: Rules = DEFAULT_RULES, illegal_return: float = -1.0) -> Evaluation:
    """Compute a policy's exact statistics in one forward pass over the decision states.

    Args:
        policy: deterministic or stochastic. It is evaluated once in each state that it can reach.
        rules: the payout of naturals.
        illegal_return: the return of a hand that ends with an illegal answer (None), in bets.

    Raises:
        ValueError: see :func:`choice_at`.
    """
    visits = dict(deal_distribution())
    endings: list[tuple[float, _Ending]] = []
    illegal = 0.0
    for state in STATES_BY_LOW_SUM:
        visit_probability = visits.get(state, 0.0)
        if visit_probability == 0.0:
            continue
        chances = choice_at(policy, state)
        illegal += visit_probability * chances.get(None, 0.0)
        stand = chances.get("stand", 0.0)
        dealt = deal_distribution().get(state, 0.0) if state[:2] == (21, True) else 0.0
        endings.append((dealt * stand, _standing_natural(state.dealer, rules)))
        endings.append(((visit_probability - dealt) * stand, _settle_stand(state.total, state.dealer)))
        hit = visit_probability * chances.get("hit", 0.0)
        if hit > 0.0:
            successor_chances, bust = successors(state)
            endings.append((hit * bust, _BUST))
            for after, probability in successor_chances:
                visits[after] = visits.get(after, 0.0) + hit * probability
    win, push, loss, mean, square = (
        math.fsum(chance * ending[i] for chance, ending in endings) for i in range(5)
    )
    mean += illegal * illegal_return
    square += illegal * illegal_return**2
    return Evaluation(mean, square - mean**2, win, push, loss, illegal, MappingProxyType(visits))


def agreement(policy: Policy) -> Agreement:
    """Compare a policy with the optimal one in every decision state.

    Raises:
        ValueError: see :func:`choice_at`.
    """
    answers = {state: choice_at(policy, state) for state in DECISION_STATES}
    visits = evaluate(answers).visits
    agrees = {state: answers[state].get(best, 0.0) for state, best in optimal_policy().items()}
    total = math.fsum(visits.values())
    return Agreement(
        unweighted=math.fsum(agrees.values()) / len(agrees),
        weighted=math.fsum(chance * agrees[s] for s, chance in visits.items()) / total,
    )
