"""The models of Place Holder on the wire."""

from typing import Final, Literal, TypeAlias

from pydantic import Field

from openenv_core import Action, Observation

LOWEST: Final = 1
HIGHEST: Final = 10
GUESSES: Final = 4

Hint: TypeAlias = Literal["higher", "lower", "found"]


class PlaceHolderAction(Action):
    """One guess."""

    # Strict: otherwise pydantic accepts true as 1 and "7" as 7.
    guess: int = Field(ge=LOWEST, le=HIGHEST, strict=True, description="the number that is guessed")


class PlaceHolderObservation(Observation):
    """What the player sees. The reward is null after a reset, 1 for the right number, 0 otherwise."""

    hint: Hint | None = Field(
        default=None, description="where the number is, seen from the last guess; null after a reset"
    )
    lowest: int = Field(description="the least number that it can still be")
    highest: int = Field(description="the greatest number that it can still be")
    guesses_left: int = Field(ge=0, description="how many guesses are left")
    text: str = Field(description="all of this in words, for people and language models")
