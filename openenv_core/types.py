"""The values that cross the wire: actions, observations, states and what a caller gets back.

Authors subclass `Action`, `Observation` and `State`; everything else here is used as it is.
"""

from dataclasses import dataclass
from typing import Any, Generic

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from typing_extensions import TypeVar

ActT = TypeVar("ActT", default=Any)
ObsT = TypeVar("ObsT", default=Any)
StateT = TypeVar("StateT", default=Any)
ObsT_co = TypeVar("ObsT_co", covariant=True, default=Any)

# Bytes travel as base64, so that any bytes travel; the same setting reads them back.
_WIRE = ConfigDict(arbitrary_types_allowed=True, ser_json_bytes="base64", val_json_bytes="base64")

Reward = bool | int | float | None
"""What an observation may carry as its reward. The JSON type is kept on the WebSocket."""


class Action(BaseModel):
    """What an agent asks of an environment. Subclass it and add fields; unknown keys are refused."""

    model_config = ConfigDict(**_WIRE, extra="forbid")

    metadata: dict[str, Any] = Field(default_factory=dict)


class Observation(BaseModel):
    """What an environment answers. Subclass it and add fields; unknown keys are refused.

    Attributes:
        done: True when the episode is over. A further step needs a reset first.
        reward: The reward of this step alone (a delta, never a running sum); None where there is none.
        metadata: Anything beside the observation proper, for logs and tools.
    """

    model_config = ConfigDict(**_WIRE, extra="forbid")

    done: bool = False
    reward: Reward = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class State(BaseModel):
    """Where an episode stands. Environments may add keys, declared or not."""

    model_config = ConfigDict(**_WIRE, extra="allow")

    episode_id: str | None = None
    step_count: NonNegativeInt = 0


class EnvironmentMetadata(BaseModel):
    """What an environment says of itself on `GET /metadata`."""

    model_config = ConfigDict(extra="forbid")

    name: str
    description: str
    readme_content: str | None = None
    version: str | None = None
    author: str | None = None
    documentation_url: str | None = None


class ConcurrencyConfig(BaseModel):
    """How many sessions a server holds, and how long it keeps one that nobody uses.

    Attributes:
        max_concurrent_envs: The greatest number of sessions at once.
        session_timeout: Seconds that a session may go unused; None leaves it to the server's settings.
    """

    model_config = ConfigDict(extra="forbid")

    max_concurrent_envs: PositiveInt = 1
    session_timeout: PositiveFloat | None = None


@dataclass
class StepResult(Generic[ObsT_co]):
    """What `reset` and `step` of a client return.

    Attributes:
        observation: The environment's observation.
        reward: The reward of this step; None where there is none (after a reset, for one).
        done: True when the episode is over.
        metadata: The observation's metadata; None when it is empty.
    """

    observation: ObsT_co
    reward: Reward = None
    done: bool = False
    metadata: dict[str, Any] | None = None
