"""The models of Place Holder on the wire, besides tool calls and their results."""

from pydantic import Field

from openenv_core import Observation


class PlaceHolderObservation(Observation):
    """The observation after a reset: the task."""

    task: str = Field(description="what is to be done with the tools")
    calls_left: int = Field(ge=0, description="how many calls there are to do it in")
