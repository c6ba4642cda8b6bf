"""What crosses the wire of the database world, beside calls of tools, and what it raises."""

from typing import Literal, TypeAlias

from pydantic import Field

from openenv_core import Observation, State
from openenv_core.tasks import InvalidResetOptionError
from openenv_core.tools import ToolFailedError

__all__ = ["InvalidResetOptionError", "QueryRefusedError"]


class QueryRefusedError(ToolFailedError):
    """A query was not run, or not to its end. The message is for whoever wrote it."""


Split: TypeAlias = Literal["train", "validation", "test"]
Difficulty: TypeAlias = Literal["easy", "medium", "hard"]


class SqliteObservation(Observation):
    """What a reset answers: the task. Steps answer as tools do."""

    task: str = Field(description="the whole task in words: all that a policy needs to begin")
    question: str = Field(description="the question alone")
    answer_format: str = Field(description="what the answer has to be: a number, a list, ...")
    difficulty: Difficulty
    calls_left: int = Field(ge=0, description="how many calls of tools there are")


class SqliteState(State):
    """Where the episode stands, for the one who runs it. Whoever knows the task's index can work out its answer."""

    seed: int | None = Field(default=None, description="what chose the task; null where its index was given")
    split: Split | None = Field(default=None, description="the split of the task; null before a reset")
    index: int | None = Field(default=None, description="the index of the task in its split")
    difficulty: Difficulty | None = None
    calls_left: int = Field(default=0, ge=0)
    done: bool = Field(default=False, description="whether the episode has ended")
