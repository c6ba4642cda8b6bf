"""What crosses the wire of an environment of Gymnasium's; its spaces stand in the JSON schemas of two fields."""

from functools import partial
from typing import Annotated, Any

from gymnasium import Space
from pydantic import Field, JsonValue, PlainSerializer, create_model

from openenv_core import Action, Observation, State
from openenv_core.adapters.spaces import describe_space, write_value


class GymnasiumAction(Action):
    """One action."""

    action: JsonValue = Field(description="a value of the action space")


class GymnasiumObservation(Observation):
    """What Gymnasium's environment answers. The reward is null after a reset.

    Attributes:
        observation: A value of the observation space.
        info: What else Gymnasium's environment says, as far as JSON can say it.
    """

    observation: Any = Field(description="a value of the observation space")
    info: dict[str, JsonValue] = Field(default_factory=dict)


class GymnasiumState(State):
    """Where the episode stands.

    Attributes:
        frame: The picture of it as PNG, where the environment was made with a render mode of "rgb_array".
    """

    frame: bytes | None = None


def models_for(
    action_space: Space[Any], observation_space: Space[Any]
) -> tuple[type[GymnasiumAction], type[GymnasiumObservation]]:
    """Return models whose JSON schemas say the spaces; the observation's holds a value as Gymnasium has it.

    Raises:
        ConfigurationError: The spaces cannot cross the wire.
    """

    def annotate(space: Space[Any]) -> Any:
        return Field(json_schema_extra={"gymnasium_space": describe_space(space)})

    action_type = Annotated[
        Any, annotate(action_space)
    ]  # read from JSON: to look once more whether it is, takes time
    written = PlainSerializer(partial(write_value, observation_space))
    observation_type = Annotated[Any, annotate(observation_space), written]
    build: Any = create_model  # its overloads do not know types made at run time
    return (
        build("GymnasiumAction", __base__=GymnasiumAction, action=(action_type, ...)),
        build("GymnasiumObservation", __base__=GymnasiumObservation, observation=(observation_type, ...)),
    )
