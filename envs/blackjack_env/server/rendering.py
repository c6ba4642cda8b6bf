"""The table in words."""

from collections.abc import Sequence

from ..models import Outcome

_NAMES = ("?", "A", "2", "3", "4", "5", "6", "7", "8", "9", "10")
_ENDINGS: dict[Outcome, str] = {"win": "You win", "push": "It is a draw", "loss": "You lose"}


def describe_hand(cards: Sequence[int], total: int, usable_ace: bool) -> str:
    """Names the cards (values 1 to 10) and what they come to, for example `A, 6 (soft 17)`."""
    return f"{', '.join([_NAMES[card] for card in cards])} ({'soft ' if usable_ace else ''}{total})"


def describe_turn(player: str, dealer_card: int) -> str:
    """Words the table while the player has to decide; `player` comes from :func:`describe_hand`."""
    return f"You hold {player}. The dealer shows {_NAMES[dealer_card]}. Hit or stand?"


def describe_end(player: str, dealer: str, bust: bool, outcome: Outcome, reward: float) -> str:
    """Words the table after the end; the hands come from :func:`describe_hand`, the reward is in bets."""
    busted = " and are bust" if bust else ""
    return f"You hold {player}{busted}. The dealer holds {dealer}. {_ENDINGS[outcome]}: {reward:+g}."
