"""The released names of what crosses the wire, as models: for folders and tests that name them."""

import inspect
import json
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from openenv_core.environment import Environment
from openenv_core.protocol import codes
from openenv_core.protocol.replies import encode_observation
from openenv_core.tools import CallToolAction, ListToolsAction
from openenv_core.types import Action, EnvironmentMetadata, Observation, Reward


class ServerMode(StrEnum):
    """What a server offers: episodes too, or tools alone."""

    SIMULATION = "simulation"
    PRODUCTION = "production"


class HealthStatus(StrEnum):
    """What /health says."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DEGRADED = "degraded"


class WSErrorCode(StrEnum):
    """What an error frame says."""

    INVALID_JSON = codes.INVALID_JSON
    UNKNOWN_TYPE = codes.UNKNOWN_TYPE
    VALIDATION_ERROR = codes.VALIDATION_ERROR
    EXECUTION_ERROR = codes.EXECUTION_ERROR
    CAPACITY_REACHED = codes.CAPACITY_REACHED
    FACTORY_ERROR = codes.FACTORY_ERROR
    SESSION_ERROR = codes.SESSION_ERROR


class BaseMessage(BaseModel):
    """A model without further keys."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class HealthResponse(BaseMessage):
    """/health."""

    status: HealthStatus = HealthStatus.HEALTHY


class SchemaResponse(BaseMessage):
    """/schema."""

    action: dict[str, Any]
    observation: dict[str, Any]
    state: dict[str, Any]
    reset_observation: dict[str, Any] | None = None


class ResetRequest(BaseModel):
    """What /reset takes; further keys are for the environment."""

    model_config = ConfigDict(extra="allow")

    seed: Annotated[int, Field(ge=0)] | None = None
    episode_id: Annotated[str, Field(max_length=255)] | None = None


class StepRequest(BaseModel):
    """What /step takes; likewise."""

    model_config = ConfigDict(extra="allow")

    action: dict[str, Any]
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    request_id: Annotated[str, Field(max_length=255)] | None = None


class StepResponse(BaseModel):
    """What /step answers."""

    model_config = ConfigDict(extra="forbid")

    observation: dict[str, Any]
    reward: Reward = None
    done: bool = False
    metadata: dict[str, Any] | None = None


class ResetResponse(StepResponse):
    """What /reset answers."""


class ListTasksRequest(BaseMessage):
    """What asks for the tasks of a split."""

    split: str


class NumTasksRequest(ListTasksRequest):
    """What asks how many there are."""


class GetTaskRequest(ListTasksRequest):
    """What asks for one."""

    index: int


class GetTaskRangeRequest(ListTasksRequest):
    """What asks for several."""

    start: int | None = None
    stop: int | None = None


class WSResetMessage(BaseMessage):
    """A reset frame."""

    type: Literal["reset"] = "reset"
    data: dict[str, Any] = Field(default_factory=dict)


class WSStepMessage(BaseMessage):
    """A step frame."""

    type: Literal["step"] = "step"
    data: dict[str, Any]


class WSStateMessage(BaseMessage):
    """A state frame."""

    type: Literal["state"] = "state"


class WSCloseMessage(BaseMessage):
    """A close frame."""

    type: Literal["close"] = "close"


WSIncomingMessage: TypeAlias = Annotated[
    WSResetMessage | WSStepMessage | WSStateMessage | WSCloseMessage, Field(discriminator="type")
]
"""Any of these."""


class WSObservationResponse(BaseModel):
    """The frame that answers a reset or a step."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["observation"] = "observation"
    data: dict[str, Any]


class WSStateResponse(BaseModel):
    """The frame that answers a state frame."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["state"] = "state"
    data: dict[str, Any]


class WSErrorResponse(BaseModel):
    """The frame that tells of a fault."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["error"] = "error"
    data: dict[str, Any]


def serialize_observation(observation: Observation) -> dict[str, Any]:
    """Return an observation as the wire has it: its reward, its end and its metadata beside it."""
    data: dict[str, Any] = json.loads(encode_observation(observation))["data"]
    return data


def load_environment_metadata(
    env: Any, env_name: str | None = None
) -> EnvironmentMetadata | Awaitable[EnvironmentMetadata]:
    """Return what an environment says of itself; of a class or a factory, what it is called and documented as."""
    if isinstance(env, Environment):
        return env.get_metadata()
    own_name = str(getattr(env, "__name__", type(env).__name__))
    return EnvironmentMetadata(
        name=env_name or own_name, description=inspect.cleandoc(env.__doc__ or own_name), version="1.0.0"
    )


def deserialize_action(action_data: Mapping[str, Any], action_cls: type[Action]) -> Action:
    """Return the action that a dict stands for: of a class, or a call of tools where that may be any action.

    Raises:
        pydantic.ValidationError: It stands for none.
    """
    of_tools: dict[str, type[Action]] = {"list_tools": ListToolsAction, "call_tool": CallToolAction}
    if action_cls in (Action, *of_tools.values()):
        action_cls = of_tools.get(str(action_data.get("type")), action_cls)
    return action_cls.model_validate(dict(action_data))


def deserialize_action_with_preprocessing(action_data: Mapping[str, Any], action_cls: type[Action]) -> Action:
    """Do the same with what a form gives: arguments as JSON in a text, a number as digits.

    Raises:
        pydantic.ValidationError: It stands for none.
    """
    data = dict(action_data)
    for name, read in (("arguments", json.loads), ("action_id", int)):
        if isinstance(data.get(name), str):
            with suppress(ValueError):
                data[name] = read(data[name])
    return deserialize_action(data, action_cls)
