"""The models of Place Holder on the wire.

The action model must match the environment's action space. That of CartPole-v1 is Discrete(2): an integer. For a Box
use `list[float]` with a length, for a MultiDiscrete `list[int]`. `server/spaces.py` does the rest.
"""

from pydantic import Field, JsonValue

from openenv_core import Action, Observation

ACTIONS = 2


class PlaceHolderAction(Action):
    """One action of the space."""

    # Strict: otherwise pydantic accepts true and "1" as 1.
    action: int = Field(ge=0, lt=ACTIONS, strict=True, description="0 pushes the cart left, 1 right")


class PlaceHolderObservation(Observation):
    """An observation of Gymnasium's environment. The reward is null after a reset."""

    values: JsonValue = Field(description="a value of the observation space; arrays are lists")
