"""What crosses the wire of the shop, beside calls of tools, and what it raises."""

from typing import Literal, TypeAlias

from pydantic import Field

from openenv_core import Observation, State
from openenv_core.tasks import InvalidResetOptionError
from openenv_core.tools import ToolFailedError

__all__ = ["ImpossibleRequestError", "InvalidResetOptionError"]


class ImpossibleRequestError(ToolFailedError):
    """The desk cannot do what it was asked: there is no such thing, or it is nobody's business here."""


Split: TypeAlias = Literal["train", "validation", "test"]
Difficulty: TypeAlias = Literal["easy", "medium", "hard"]


class ShopObservation(Observation):
    """What a reset answers: the task. Steps answer as tools do."""

    task: str = Field(description="the whole task in words: all that a policy needs to begin")
    requests: int = Field(ge=1, description="how many things the customer asks for")
    difficulty: Difficulty
    calls_left: int = Field(ge=0, description="how many calls of tools there are")


class ShopState(State):
    """Where the episode stands. Whoever knows the task's index can work out what would be right."""

    seed: int | None = Field(default=None, description="what chose the task; null where its index was given")
    split: Split | None = Field(default=None, description="the split of the task; null before a reset")
    index: int | None = Field(default=None, description="the index of the task in its split")
    difficulty: Difficulty | None = None
    calls_left: int = Field(default=0, ge=0)
    done: bool = Field(default=False, description="whether the episode has ended")
