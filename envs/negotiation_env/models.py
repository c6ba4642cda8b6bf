"""Actions and observations of the negotiation."""

from typing import Annotated, Final, Literal

from pydantic import Field

from openenv_core import Action, Observation, State

SEATS: Final = ("first", "second")
ITEMS: Final = ("books", "hats", "balls")

MAX_MESSAGE_CHARS: Final = 400

Item = Literal["books", "hats", "balls"]
Count = Annotated[int, Field(ge=0)]


class NegotiationAction(Action):
    """One turn: a message, with an offer, with the acceptance of the other player's offer, or with neither."""

    message: str = Field(default="", max_length=MAX_MESSAGE_CHARS, description="what the other player reads")
    take: dict[Item, Count] | None = Field(
        default=None, description="an offer: how many of each item you take; the other player gets the rest"
    )
    accept: bool = Field(
        default=False, description="accept the other player's last offer, which ends the game"
    )


class NegotiationObservation(Observation):
    """The table as one player sees it. The reward is None until the end.

    Attributes:
        seat: the player's seat.
        items: how many there are of each item.
        values: what one of each item is worth to this player; the other's values are not shown.
        talk: the messages so far, each with its speaker.
        offer: how many of each item this player would get by the other's last offer; None without one.
        turns_left: the turns left, of both players together.
        got: what this player got, at the end; None if there was no agreement.
        text: all of it in words.
    """

    seat: Literal["first", "second"]
    items: dict[Item, int]
    values: dict[Item, int]
    talk: list[tuple[str, str]] = Field(default_factory=list)
    offer: dict[Item, int] | None = None
    turns_left: int
    got: dict[Item, int] | None = None
    text: str


class NegotiationState(State):
    """The state of a game, which a server shows to nobody.

    Attributes:
        items: how many there are of each item.
        values: what each is worth, by seat.
        talk: the messages so far, each with its speaker.
        offer: what the player to move would get by the last offer.
        turns: turns taken.
        got: what each player got, by seat, once they have agreed.
    """

    items: dict[Item, int] = Field(default_factory=dict)
    values: dict[str, dict[Item, int]] = Field(default_factory=dict)
    talk: list[tuple[str, str]] = Field(default_factory=list)
    offer: dict[Item, int] | None = None
    turns: int = 0
    got: dict[str, dict[Item, int]] | None = None
