"""Actions, observations and states of BlackJack."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from openenv_core import Action, Observation, State

Move: TypeAlias = Literal["hit", "stand"]
Outcome: TypeAlias = Literal["win", "push", "loss"]
Card: TypeAlias = Annotated[int, Field(ge=1, le=10)]
"""A card by its value: 1 is an ace, 10 is a ten or a face card."""


def _name_of_number(value: Any) -> Any:
    # bool is a subclass of int, but True and False are not moves: accept only a plain 0 or 1.
    if type(value) is int and value in (0, 1):
        return "hit" if value else "stand"
    return value


class BlackjackAction(Action):
    """One decision.

    Attributes:
        action: "hit" or "stand". Gymnasium's numbers are taken too: 0 for stand, 1 for hit.
    """

    action: Annotated[Move, BeforeValidator(_name_of_number)] = Field(
        description='"hit" takes a card, "stand" ends the hand; 1 (hit) and 0 (stand) are accepted as well'
    )


class BlackjackObservation(Observation):
    """The table as the player sees it.

    The reward is None after a reset, 0 after a hit that did not bust, and the hand's return at the end: -1, 0
    or 1 bets (1.5 for a natural if reset enabled it). The observation contains neither the seed nor the dealer's
    hidden card, so all of it can be shown to a policy.

    Attributes:
        player_total: the value of the player's hand, with an ace counted as 11 if that does not bust.
        dealer_card: the dealer's upcard, 1 (ace) to 10.
        usable_ace: whether an ace is counted as 11 in `player_total`.
        legal_actions: the possible actions; empty at the end.
        player_cards: the player's cards in the order in which they were dealt.
        dealer_cards: only the upcard until the end, then the whole hand.
        dealer_total: the value of the dealer's hand; None until the end.
        player_natural: whether the player was dealt an ace and a ten and has drawn no card since.
        outcome: how the hand ended; None until then.
        text: all of the above in words, for people and language models.
    """

    player_total: int
    dealer_card: Card
    usable_ace: bool
    legal_actions: list[Move]
    player_cards: list[Card]
    dealer_cards: list[Card]
    dealer_total: int | None = None
    player_natural: bool = False
    outcome: Outcome | None = None
    text: str


class BlackjackState(State):
    """The state of an episode, for the trainer rather than for the player.

    Attributes:
        seed: the seed of the deal, given or drawn; None before the first reset. Resetting with it and the same
            options repeats the hand.
        natural: whether a natural pays 1.5.
        sab: whether Sutton and Barto's rule for naturals applies.
        done: whether the hand has ended.
    """

    seed: int | None = None
    natural: bool = False
    sab: bool = False
    done: bool = False
