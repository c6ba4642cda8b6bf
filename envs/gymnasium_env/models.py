"""What crosses the wire of an environment of Gymnasium's; its spaces stand in the JSON schemas of two fields."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, JsonValue, create_model

from openenv_core import Action, Observation, State


class GymnasiumAction(Action):
    """One action."""

    action: JsonValue = Field(description="a value of the action space")


class GymnasiumObservation(Observation):
    """What Gymnasium's environment answers. The reward is null after a reset.

    Attributes:
        observation: A value of the observation space.
        info: What else Gymnasium's environment says, as far as JSON can say it.
    """

    observation: JsonValue = Field(description="a value of the observation space")
    info: dict[str, JsonValue] = Field(default_factory=dict)


class GymnasiumState(State):
    """Where the episode stands.

    Attributes:
        frame: The picture of it as PNG, where the environment was made with a render mode of "rgb_array".
    """

    frame: bytes | None = None


def models_for(
    action_space: Mapping[str, Any], observation_space: Mapping[str, Any]
) -> tuple[type[GymnasiumAction], type[GymnasiumObservation]]:
    """Return models whose JSON schemas say the spaces, as `openenv_core.adapters.spaces.describe_space` has them."""

    def value(space: Mapping[str, Any]) -> Any:
        return Annotated[JsonValue, Field(json_schema_extra={"gymnasium_space": dict(space)})]

    action = create_model("GymnasiumAction", __base__=GymnasiumAction, action=(value(action_space), ...))
    observation = create_model(
        "GymnasiumObservation", __base__=GymnasiumObservation, observation=(value(observation_space), ...)
    )
    return action, observation
