"""The odds of the BlackJack game that this environment serves, exactly: deals, draws, dealer, payouts.

The game is Gymnasium's: an infinite deck (1 to 9 with probability 1/13 each, ten 4/13; an ace is a 1), the
dealer draws to 17 and stands on every 17. All that follows from one hand's arithmetic is here; what a policy
makes of it is in :mod:`.oracle`. Pure Python; imports no other part of the project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple


class DecisionState(NamedTuple):
    """All that a player has to decide on; a plain tuple of the same values is equal to it and hashes alike.

    Attributes:
        total: the hand's value, an ace counted as 11 where that does not bust.
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
"""Every state at which a decision can be due: 18 hard and 10 soft totals, each against 10 upcards."""


@dataclass(frozen=True)
class Rules:
    """The two payout variants of Gymnasium's game, both about a natural (an ace and a ten as dealt).

    Attributes:
        natural: a natural that beats the dealer pays 1.5. It still only draws against any other 21.
        sab: Sutton and Barto's rule: a natural beats everything but another natural, and pays 1.
            Takes precedence over `natural`.
    """

    natural: bool = False
    sab: bool = False


DEFAULT_RULES = Rules()


class Ending(NamedTuple):
    """How a hand ends from some point on.

    Attributes:
        win: probability that the player wins; with push and loss it sums to 1.
        push: probability of a draw.
        loss: probability that the player loses.
        mean: expected return, in bets.
        square: expected square of the return.
    """

    win: float
    push: float
    loss: float
    mean: float
    square: float


BUST = Ending(win=0.0, push=0.0, loss=1.0, mean=-1.0, square=1.0)


def add_card(total: int, usable_ace: bool, card: int) -> tuple[int, bool]:
    """Returns (total, usable_ace) of a hand after one more card (1 to 10); a total above 21 is a bust."""
    low = total - 10 if usable_ace else total
    has_ace = usable_ace or card == 1
    # An ace that has already been counted down to 1 stays there: low is then at least 12.
    if has_ace and low + card <= 11:
        return low + card + 10, True
    return low + card, False


@cache
def dealer_distribution(upcard: int) -> Mapping[int, float]:
    """Probabilities of the dealer's final totals 17 to 21, and of a bust as 22, from the upcard (1 to 10)."""
    final = dict.fromkeys(range(17, 23), 0.0)

    def draw(total: int, soft: bool, chance: float) -> None:
        if total >= 17:
            final[min(total, 22)] += chance
            return
        for card, probability in CARDS.items():
            draw(*add_card(total, soft, card), chance * probability)

    # The hole card is one more draw, and no upcard reaches 17 by itself.
    draw(*add_card(0, False, upcard), 1.0)
    return MappingProxyType(final)


@cache
def standing(total: int, dealer: int) -> Ending:
    """What follows when the player stands on a total (4 to 21) against an upcard; no payout for naturals."""
    final = dealer_distribution(dealer)
    win = math.fsum(p for end, p in final.items() if end > 21 or end < total)
    push = final.get(total, 0.0)
    loss = 1.0 - win - push
    return Ending(win, push, loss, mean=win - loss, square=win + loss)


@cache
def standing_natural(dealer: int, rules: Rules) -> Ending:
    """What follows when the player stands on a natural, as dealt, against an upcard."""
    plain = standing(21, dealer)
    if rules.sab:
        push = {1: CARDS[10], 10: CARDS[1]}.get(dealer, 0.0)
        return Ending(1.0 - push, push, loss=0.0, mean=1.0 - push, square=1.0 - push)
    if rules.natural:
        return plain._replace(mean=1.5 * plain.win, square=2.25 * plain.win)
    return plain


def _low(state: DecisionState) -> int:
    return state.total - 10 if state.usable_ace else state.total


@cache
def successors(state: DecisionState) -> tuple[tuple[tuple[DecisionState, float], ...], float]:
    """What a hit leads to: the states that follow with their probabilities, and the probability of a bust."""
    reached: dict[DecisionState, float] = {}
    bust = 0.0
    for card, probability in CARDS.items():
        total, soft = add_card(state.total, state.usable_ace, card)
        if total > 21:
            bust += probability
        else:
            after = DecisionState(total, soft, state.dealer)
            reached[after] = reached.get(after, 0.0) + probability
    return tuple(reached.items()), bust


@cache
def deal_distribution() -> Mapping[DecisionState, float]:
    """Probability of each state as dealt. A dealt soft 21 is a natural, and only a natural is one."""
    dealt: dict[DecisionState, float] = {}
    for dealer, upcard in CARDS.items():
        for first, one in CARDS.items():
            for second, two in CARDS.items():
                total, soft = add_card(*add_card(0, False, first), second)
                state = DecisionState(total, soft, dealer)
                dealt[state] = dealt.get(state, 0.0) + upcard * one * two
    return MappingProxyType(dealt)


STATES_BY_LOW_SUM = tuple(sorted(DECISION_STATES, key=_low))
"""The decision states in an order in which every hit leads to a later one."""
