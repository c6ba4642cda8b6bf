"""Actions and observations of a PettingZoo environment; the JSON schemas of two fields describe its spaces."""

from collections.abc import Mapping
from typing import Annotated, Any

from gymnasium import Space
from pydantic import Field, JsonValue, create_model, field_serializer

from openenv_core import Action, Observation
from openenv_core.adapters.spaces import SEAT_SPACES, describe_space, write_value
from openenv_core.protocol.batch import SPACE


class PettingZooAction(Action):
    """One action of the agent whose turn it is."""

    action: JsonValue = Field(description="a value of the agent's action space")


class PettingZooObservation(Observation):
    """What an agent observes. The reward is null after a reset.

    Attributes:
        seat: the agent.
        observation: a value of the agent's observation space.
        info: the entries of its `info` that JSON can represent.
    """

    seat: str
    observation: Any = Field(description="a value of the agent's observation space")
    info: dict[str, JsonValue] = Field(default_factory=dict)


def models_for(
    action_spaces: Mapping[str, Space[Any]], observation_spaces: Mapping[str, Space[Any]]
) -> tuple[type[PettingZooAction], type[PettingZooObservation]]:
    """Return the models whose JSON schemas describe the agents' spaces.

    Raises:
        ConfigurationError: A space cannot be encoded as JSON.
    """

    class PettingZooSeen(PettingZooObservation):
        __doc__ = PettingZooObservation.__doc__
        observation: Annotated[Any, _describe(observation_spaces)]

        @field_serializer("observation")
        def write(self, value: Any) -> Any:
            return write_value(observation_spaces[self.seat], value)

    build: Any = create_model
    action = (Annotated[Any, _describe(action_spaces)], ...)
    return build("PettingZooAction", __base__=PettingZooAction, action=action), PettingZooSeen


def _describe(spaces: Mapping[str, Space[Any]]) -> Any:
    """Return a field of one space, if all agents have the same, or else with that of each."""
    first = next(iter(spaces.values()))
    if all(space == first for space in spaces.values()):
        return Field(json_schema_extra={SPACE: describe_space(first)})
    return Field(
        json_schema_extra={SEAT_SPACES: {name: describe_space(space) for name, space in spaces.items()}}
    )
