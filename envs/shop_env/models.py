"""The observation of a reset and the state; steps use the core's tool actions and observations."""

from pydantic import Field

from openenv_core import Observation
from openenv_core.worlds import Difficulty, WorldState


class ShopObservation(Observation):
    """What a reset answers: the task. Steps answer as tools do."""

    task: str = Field(description="the whole task in words: all that a policy needs to begin")
    requests: int = Field(ge=1, description="how many things the customer asks for")
    difficulty: Difficulty
    calls_left: int = Field(ge=0, description="how many calls of tools there are")


class ShopState(WorldState):
    """The episode's state, for the trainer and not for the policy: the task's index determines what is right."""
