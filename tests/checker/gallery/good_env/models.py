"""What crosses the wire."""

from typing import Any, Literal

from pydantic import Field, field_validator

from openenv_core import Action, Observation, State


class Guess(Action):
    """A number, and why."""

    number: int = Field(description="the guess, from 1 to 100", examples=[50])
    note: str = Field(default="-", max_length=2_000_000, description="whatever led to it")

    @field_validator("note", mode="before")
    @classmethod
    def _unwrapped(cls, value: Any) -> Any:
        return value


class Hint(Observation):
    """Where the hidden number lies, as seen from the last guess."""

    episode: str | None
    hint: Literal["start", "low", "high", "right"]
    left: int = Field(ge=0, le=7)
    guesses: list[int]
    parity: int = Field(ge=0, le=1, description="of a number that is drawn at each turn")


class GuessState(State):
    """Where the episode stands."""

    done: bool = False
