"""What crosses the wire of Place Holder: calls of tools, and what comes back."""

from typing import TypeAlias

from pydantic import Field

from openenv_core import Observation, State
from openenv_core.tools import CallToolAction, CallToolObservation, ListToolsAction, ListToolsObservation

PlaceHolderAction: TypeAlias = ListToolsAction | CallToolAction
"""Which tools are there, or a call of one."""


class PlaceHolderObservation(Observation):
    """What a reset answers: the task."""

    task: str = Field(description="what is to be done with the tools")
    calls_left: int = Field(ge=0, description="how many steps there are to do it in")


PlaceHolderAnswer: TypeAlias = ListToolsObservation | CallToolObservation
"""What a step answers. The reward is 1 for the right total, 0 otherwise."""


class PlaceHolderState(State):
    """Where the episode stands, for the one who runs it. Whoever knows the seed knows the answer."""

    seed: int | None = Field(default=None, description="what the task was drawn from; null before a reset")
    done: bool = Field(default=False, description="whether the episode has ended")
