"""What crosses the wire of Place Holder.

An action has to say what the environment's action space takes. That of CartPole-v1 is Discrete(2): an integer. For a
Box it would be `list[float]` with a length, for a MultiDiscrete `list[int]`. `server/spaces.py` does the rest, and a
test holds this model against the space.
"""

from pydantic import Field, JsonValue

from openenv_core import Action, Observation, State

ACTIONS = 2


class PlaceHolderAction(Action):
    """One action of the space."""

    # Strict: without it, pydantic takes true for 1 and "1" for 1.
    action: int = Field(ge=0, lt=ACTIONS, strict=True, description="0 pushes the cart left, 1 right")


class PlaceHolderObservation(Observation):
    """What Gymnasium's environment answers. The reward is null after a reset."""

    values: JsonValue = Field(description="a value of the observation space; arrays are lists")


class PlaceHolderState(State):
    """Where the episode stands, for the one who runs it."""

    seed: int | None = Field(default=None, description="what the episode came from; null before a reset")
    done: bool = Field(default=False, description="whether the episode has ended")
