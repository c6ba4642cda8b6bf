"""The models of Place Holder on the wire, besides tool calls and their results."""

from pydantic import Field

from openenv_core import Observation, State


class PlaceHolderObservation(Observation):
    """The observation after a reset: the task."""

    task: str = Field(description="what is to be done with the tools")
    calls_left: int = Field(ge=0, description="how many calls there are to do it in")


class PlaceHolderState(State):
    """The state of the episode, for its operator: the seed reveals the answer."""

    seed: int | None = Field(default=None, description="what the task was drawn from; null before a reset")
    done: bool = Field(default=False, description="whether the episode has ended")
