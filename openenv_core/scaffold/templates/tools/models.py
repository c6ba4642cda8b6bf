"""What crosses the wire of Place Holder, beside calls of tools and what comes back of them."""

from pydantic import Field

from openenv_core import Observation, State


class PlaceHolderObservation(Observation):
    """What a reset answers: the task."""

    task: str = Field(description="what is to be done with the tools")
    calls_left: int = Field(ge=0, description="how many calls there are to do it in")


class PlaceHolderState(State):
    """Where the episode stands, for the one who runs it. Whoever knows the seed knows the answer."""

    seed: int | None = Field(default=None, description="what the task was drawn from; null before a reset")
    done: bool = Field(default=False, description="whether the episode has ended")
