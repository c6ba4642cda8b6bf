"""Actions, observations and states of a Gymnasium environment; the JSON schemas of two fields describe its spaces."""

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
    """An observation of the Gymnasium environment. The reward is null after a reset.

    Attributes:
        observation: A value of the observation space.
        info: The entries of Gymnasium's `info` that JSON can represent.
    """

    observation: Any = Field(description="a value of the observation space")
    info: dict[str, JsonValue] = Field(default_factory=dict)


class GymnasiumState(State):
    """The state of an episode.

    Attributes:
        frame: The rendered frame as PNG, if the environment's render mode is "rgb_array".
    """

    frame: bytes | None = None


def models_for(
    action_space: Space[Any], observation_space: Space[Any]
) -> tuple[type[GymnasiumAction], type[GymnasiumObservation]]:
    """Return the action and observation models whose JSON schemas describe the spaces.

    The observation model holds Gymnasium's own value and encodes it only when serialized.

    Raises:
        ConfigurationError: A space cannot be encoded as JSON.
    """

    def annotate(space: Space[Any]) -> Any:
        return Field(json_schema_extra={"gymnasium_space": describe_space(space)})

    action_type = Annotated[
        Any, annotate(action_space)
    ]  # not JsonValue: the value was parsed from JSON, and validating that again costs time
    written = PlainSerializer(partial(write_value, observation_space))
    observation_type = Annotated[Any, annotate(observation_space), written]
    build: Any = create_model  # its overloads do not accept types made at run time
    return (
        build("GymnasiumAction", __base__=GymnasiumAction, action=(action_type, ...)),
        build("GymnasiumObservation", __base__=GymnasiumObservation, observation=(observation_type, ...)),
    )
