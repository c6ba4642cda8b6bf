"""Actions and observations of Kuhn poker, and how the game is played out."""

from typing import Final, Literal, TypeAlias

from pydantic import Field

from openenv_core import Action, Observation, State

Move: TypeAlias = Literal["pass", "bet"]

SEATS: Final = ("first", "second")
CARDS: Final = ("J", "Q", "K")

PASS: Final = "p"
BET: Final = "b"

PAYOFFS: Final = {"pp": (1, None), "pbp": (1, 1), "bp": (1, 0), "pbb": (2, None), "bb": (2, None)}
"""The ends of a game, by its history: the stake of each player, and who wins it; None: the higher card."""


class KuhnAction(Action):
    """One decision: "pass" checks, or folds to a bet; "bet" bets one, or calls a bet."""

    action: Move = Field(description='"pass" checks, or folds to a bet; "bet" bets one, or calls a bet')


class KuhnObservation(Observation):
    """The table as one player sees it. The reward is None until the end, and then what the player wins or loses.

    Attributes:
        seat: the player's seat.
        card: the player's card: J, Q or K.
        history: the moves so far, p for a pass and b for a bet.
        opponent_card: the other card, after a showdown only.
        text: all of it in words.
    """

    seat: Literal["first", "second"]
    card: Literal["J", "Q", "K"]
    history: str = ""
    opponent_card: Literal["J", "Q", "K"] | None = None
    text: str


class KuhnState(State):
    """The state of a game, which a server shows to nobody."""

    cards: dict[str, int] = Field(default_factory=dict)
    history: str = ""


def payoff(cards: tuple[int, int], history: str) -> tuple[int, int] | None:
    """Return what each player wins, with the cards of first and second player (0 to 2); None if the game goes on."""
    if history not in PAYOFFS:
        return None
    stake, winner = PAYOFFS[history]
    if winner is None:
        winner = int(cards[1] > cards[0])
    return (stake, -stake) if winner == 0 else (-stake, stake)
