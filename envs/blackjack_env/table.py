"""The table in words, and the observation of any decision."""

from collections.abc import Sequence

from .models import BlackjackObservation, Outcome
from .oracle import DecisionState

_NAMES = ("?", "A", "2", "3", "4", "5", "6", "7", "8", "9", "10")
_ENDINGS: dict[Outcome, str] = {"win": "You win", "push": "It is a draw", "loss": "You lose"}


def describe_hand(cards: Sequence[int], total: int, usable_ace: bool) -> str:
    """Return the cards (values 1 to 10) and their total as text, for example `A, 6 (soft 17)`."""
    return f"{', '.join([_NAMES[card] for card in cards])} ({'soft ' if usable_ace else ''}{total})"


def describe_turn(player: str, dealer_card: int) -> str:
    """Describe the table while the player has to decide. `player` is a result of :func:`describe_hand`."""
    return f"You hold {player}. The dealer shows {_NAMES[dealer_card]}. Hit or stand?"


def describe_end(player: str, dealer: str, bust: bool, outcome: Outcome, reward: float) -> str:
    """Describe the end of a hand. `player` and `dealer` are results of :func:`describe_hand`; `reward` is in bets."""
    busted = " and are bust" if bust else ""
    return f"You hold {player}{busted}. The dealer holds {dealer}. {_ENDINGS[outcome]}: {reward:+g}."


def observe_decision(state: DecisionState) -> BlackjackObservation:
    """Return what a server sends after a reset that deals a hand of this state, to ask a policy about each state.

    The hand is the one with the highest first card, or with an ace if the state has one. Two cards are no hard 21,
    which has three and is seen only after a hit.
    """
    total, usable_ace, dealer = state
    first = 1 if usable_ace else min(10, total - 2)
    cards = [first, total - 11 if usable_ace else total - first]
    if cards[-1] > 10:
        cards[1:] = [9, 2]
    return BlackjackObservation(
        player_total=total,
        dealer_card=dealer,
        usable_ace=usable_ace,
        legal_actions=["hit", "stand"],
        player_cards=cards,
        dealer_cards=[dealer],
        player_natural=len(cards) == 2 and total == 21,
        text=describe_turn(describe_hand(cards, total, usable_ace), dealer),
    )
