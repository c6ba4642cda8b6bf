"""Exact values of policies in Kuhn poker, best responses to them, and how far they are from an equilibrium."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from typing import Final, TypeAlias

from .models import BET, PASS, payoff

Policy: TypeAlias = Callable[[int, str], float]
"""The probability of a bet, given one's card (0 for J to 2 for K) and the history. Of both seats: a history of even
length is the first player's."""

DEALS: Final = tuple(permutations(range(3), 2))

HISTORIES: Final = (("", "pb"), ("p", "b"))
"""The histories at which the first player decides, and the second."""

INFORMATION_SETS: Final = tuple(
    (card, history) for player in (0, 1) for card in range(3) for history in HISTORIES[player]
)
"""Every decision that a player may have to make: its card and the history."""


def uniform(card: int, history: str) -> float:
    """Bet half of the time: the policy whose NashConv/2 is 11/24."""
    return 0.5


def equilibrium(card: int, history: str, alpha: float = 1 / 3) -> float:
    """Return the probability of a bet in the equilibrium in which the first player bluffs with J at rate `alpha`.

    See Kuhn, "A simplified two-person poker" (1950): every `alpha` from 0 to 1/3 is one.
    """
    bets = {
        "": (alpha, 0.0, 3 * alpha),
        "pb": (0.0, alpha + 1 / 3, 1.0),
        "p": (1 / 3, 0.0, 1.0),
        "b": (0.0, 1 / 3, 1.0),
    }
    return bets[history][card]


def value(first: Policy, second: Policy) -> float:
    """Return what the first player wins on average, in antes."""
    return sum(_value(deal, "", (first, second)) for deal in DEALS) / len(DEALS)


def _value(deal: tuple[int, int], history: str, policies: tuple[Policy, Policy]) -> float:
    """Return what the first player wins on average from a point of the game on."""
    if (won := payoff(deal, history)) is not None:
        return won[0]
    player = len(history) % 2
    bet = policies[player](deal[player], history)
    return bet * _value(deal, history + BET, policies) + (1 - bet) * _value(deal, history + PASS, policies)


@dataclass(frozen=True)
class BestResponse:
    """The best answer to the other player's policy.

    Attributes:
        value: What it wins on average, in antes.
        bets: Whether it bets, by card and history.
    """

    value: float
    bets: Mapping[tuple[int, str], bool]

    def __call__(self, card: int, history: str) -> float:
        """Return the probability of a bet, which is 0 or 1: it is a `Policy`."""
        return float(self.bets[card, history])


def best_response(player: int, other: Policy) -> BestResponse:
    """Return a best response of a player (0 for the first) to the other's policy.

    With each card, the four plans for its two decisions are compared; plans for different cards do not affect each
    other.
    """
    total = 0.0
    bets: dict[tuple[int, str], bool] = {}
    for card in range(3):
        best, plan = max(_plans(player, card, other), key=lambda item: item[0])
        total += best
        bets |= {(card, history): bet for history, bet in plan.items()}
    return BestResponse(total / len(DEALS), bets)


def _plans(player: int, card: int, other: Policy) -> Iterator[tuple[float, dict[str, bool]]]:
    """Yield the sum over the deals with this card, and the plan."""
    for choice in product((False, True), repeat=2):
        plan = dict(zip(HISTORIES[player], choice, strict=True))

        def own(_: int, history: str, plan: dict[str, bool] = plan) -> float:
            return float(plan[history])

        policies = (own, other) if player == 0 else (other, own)
        won = sum(_value(deal, "", policies) for deal in DEALS if deal[player] == card)
        yield (won if player == 0 else -won), plan


def nash_conv(policy: Policy) -> float:
    """Return what both players could win by best responses to a policy that plays both seats; 0 in an equilibrium.

    Half of it is what OpenSpiel calls exploitability.
    """
    return best_response(0, policy).value + best_response(1, policy).value
