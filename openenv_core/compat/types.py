"""The released types: messages on the wire, JSON-RPC, and types of chat and coding environments."""

import inspect
import json
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, create_model
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from openenv_core.environment import Environment
from openenv_core.protocol import errors as codes
from openenv_core.protocol import jsonrpc
from openenv_core.protocol.frames import ResetOptions, StepOptions, encode_observation
from openenv_core.protocol.jsonio import dumps
from openenv_core.tools import CallToolAction, ListToolsAction
from openenv_core.types import Action, EnvironmentMetadata, Observation, Reward


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: str


class ModelTokenizer(Protocol):
    """The methods of a tokenizer that chat environments use."""

    def apply_chat_template(
        self,
        conversation: list[Message],
        tokenize: bool = True,
        return_tensors: str | None = None,
        **options: Any,
    ) -> Any:
        """Turn a conversation into text or token ids."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        """Turn token ids into text."""


class CodeExecResult(BaseModel):
    """The result of running code.

    Attributes:
        stdout: The code's output, followed on its own line by the `repr` of the last expression's value.
        stderr: The code's error output, the traceback, and why the code was ended, if it was.
        exit_code: 0 if the code ran to its end.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    stdout: str
    stderr: str
    exit_code: int


class BaseMessage(BaseModel):
    """A model that forbids extra keys."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class JsonRpcErrorCode(IntEnum):
    """Error codes of JSON-RPC."""

    PARSE_ERROR = jsonrpc.PARSE_ERROR
    INVALID_REQUEST = jsonrpc.INVALID_REQUEST
    METHOD_NOT_FOUND = jsonrpc.METHOD_NOT_FOUND
    INVALID_PARAMS = jsonrpc.INVALID_PARAMS
    INTERNAL_ERROR = jsonrpc.INTERNAL_ERROR
    SERVER_ERROR = jsonrpc.SERVER_ERROR


_TEXTS: Final = {code: code.name.replace("_", " ").capitalize() for code in JsonRpcErrorCode} | {
    JsonRpcErrorCode.INVALID_REQUEST: "Invalid Request"
}


class McpMethod(StrEnum):
    """The MCP methods for tools."""

    TOOLS_LIST = "tools/list"
    TOOLS_CALL = "tools/call"


class JsonRpcError(BaseMessage):
    """An error of JSON-RPC."""

    code: int
    message: str
    data: Any = None

    @classmethod
    def from_code(
        cls, code: JsonRpcErrorCode, message: str | None = None, data: Any = None
    ) -> "JsonRpcError":
        """Return an error, by default with JSON-RPC's standard message for the code."""
        return cls(code=int(code), message=message or _TEXTS.get(code, "Unknown error"), data=data)


class JsonRpcRequest(jsonrpc.RpcRequest):
    """A JSON-RPC request."""


class JsonRpcResponse(BaseMessage):
    """A JSON-RPC response: a result or an error, never both on the wire."""

    jsonrpc: Literal["2.0"] = "2.0"
    result: Any = None
    error: JsonRpcError | None = None
    id: str | int | None = None

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return the fields that are sent."""
        fields = super().model_dump(**options)
        outcome = "error" if self.error is not None else "result"
        return {name: fields[name] for name in ("jsonrpc", "id", outcome) if name in fields}

    def model_dump_json(self, **options: Any) -> str:
        """Return the JSON that is sent."""
        return dumps(self.model_dump(mode="json")).decode()

    @classmethod
    def success(cls, result: Any, request_id: str | int | None = None) -> "JsonRpcResponse":
        """Return the response to a request that succeeded."""
        return cls(result=result, id=request_id)

    @classmethod
    def error_response(
        cls,
        code: JsonRpcErrorCode,
        message: str | None = None,
        data: Any = None,
        request_id: str | int | None = None,
    ) -> "JsonRpcResponse":
        """Return the response to a request that failed."""
        return cls(error=JsonRpcError.from_code(code, message, data), id=request_id)


class ServerMode(StrEnum):
    """Whether a server offers episodes and tools (simulation) or tools only (production)."""

    SIMULATION = "simulation"
    PRODUCTION = "production"


class HealthStatus(StrEnum):
    """The status in a response of /health."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DEGRADED = "degraded"


class WSErrorCode(StrEnum):
    """The codes of error frames."""

    INVALID_JSON = codes.INVALID_JSON
    UNKNOWN_TYPE = codes.UNKNOWN_TYPE
    VALIDATION_ERROR = codes.VALIDATION_ERROR
    EXECUTION_ERROR = codes.EXECUTION_ERROR
    CAPACITY_REACHED = codes.CAPACITY_REACHED
    FACTORY_ERROR = codes.FACTORY_ERROR
    SESSION_ERROR = codes.SESSION_ERROR


class ResetRequest(ResetOptions):
    """The body of /reset; extra keys are passed to the environment."""


class StepRequest(StepOptions):
    """The body of /step; extra keys are passed to the environment."""


def _message(name: str, doc: str, base: Any = BaseMessage, **fields: Any) -> Any:
    """Return the model of a message, from fields as (type, default); `...` marks a required field."""
    return create_model(name, __base__=base, __doc__=doc, __module__=__name__, **fields)


def _frame(name: str, doc: str, kind: str, data: Any = None) -> Any:
    """Return the model of a frame with a type and, unless `data` is None, a field `data`."""
    fields = {} if data is None else {"data": (dict[str, Any], data)}
    return _message(name, doc, type=(Literal[kind], kind), **fields)


HealthResponse = _message("HealthResponse", "/health.", status=(HealthStatus, HealthStatus.HEALTHY))
SchemaResponse = _message(
    "SchemaResponse",
    "/schema.",
    **dict.fromkeys(("action", "observation", "state"), (dict[str, Any], ...)),
    reset_observation=(dict[str, Any] | None, None),
)
StepResponse = _message(
    "StepResponse",
    "What /step answers.",
    observation=(dict[str, Any], ...),
    reward=(Reward, None),
    done=(bool, False),
    metadata=(dict[str, Any] | None, None),
)
ResetResponse = _message("ResetResponse", "What /reset answers.", StepResponse)
ListTasksRequest = _message("ListTasksRequest", "Asks for the tasks of a split.", split=(str, ...))
NumTasksRequest = _message("NumTasksRequest", "Asks how many there are.", ListTasksRequest)
GetTaskRequest = _message("GetTaskRequest", "Asks for one.", ListTasksRequest, index=(int, ...))
GetTaskRangeRequest = _message(
    "GetTaskRangeRequest",
    "Asks for several.",
    ListTasksRequest,
    **dict.fromkeys(("start", "stop"), (int | None, None)),
)
WSMCPMessage = _frame("WSMCPMessage", "A request of JSON-RPC.", "mcp", ...)
WSMCPResponse = _message("WSMCPResponse", "Its answer.", type=(str, "mcp"), data=(dict[str, Any], ...))
WSResetMessage = _frame("WSResetMessage", "A reset.", "reset", Field(default_factory=dict))
WSStepMessage = _frame("WSStepMessage", "A step.", "step", ...)
WSStateMessage = _frame("WSStateMessage", "Asks for the state.", "state")
WSCloseMessage = _frame("WSCloseMessage", "Ends the session.", "close")
WSIncomingMessage: Any = Annotated[
    WSResetMessage | WSStepMessage | WSStateMessage | WSCloseMessage, Field(discriminator="type")
]
WSObservationResponse = _frame("WSObservationResponse", "Answers a reset or a step.", "observation", ...)
WSStateResponse = _frame("WSStateResponse", "Answers with the state.", "state", ...)
WSErrorResponse = _frame("WSErrorResponse", "Tells of a fault.", "error", ...)


def serialize_observation(observation: Observation) -> dict[str, Any]:
    """Return an observation in its wire format, with reward, done and metadata beside it."""
    data: dict[str, Any] = json.loads(encode_observation(observation))["data"]
    return data


def load_environment_metadata(
    env: Any, env_name: str | None = None
) -> EnvironmentMetadata | Awaitable[EnvironmentMetadata]:
    """Return the metadata of an environment; of a class or factory, its name and docstring as metadata."""
    if isinstance(env, Environment):
        return env.get_metadata()
    own_name = str(getattr(env, "__name__", type(env).__name__))
    return EnvironmentMetadata(
        name=env_name or own_name, description=inspect.cleandoc(env.__doc__ or own_name), version="1.0.0"
    )


def deserialize_action(action_data: Mapping[str, Any], action_cls: type[Action]) -> Action:
    """Return an action from its fields: of `action_cls`, or a tool action by `type` if that is `Action` or one of them.

    Raises:
        pydantic.ValidationError: The fields are invalid.
    """
    of_tools: dict[str, type[Action]] = {"list_tools": ListToolsAction, "call_tool": CallToolAction}
    if action_cls in (Action, *of_tools.values()):
        action_cls = of_tools.get(str(action_data.get("type")), action_cls)
    return action_cls.model_validate(dict(action_data))


def deserialize_action_with_preprocessing(action_data: Mapping[str, Any], action_cls: type[Action]) -> Action:
    """Return an action from the fields of a form, in which `arguments` may be JSON and `action_id` digits, as text.

    Raises:
        pydantic.ValidationError: The fields are invalid.
    """
    data = dict(action_data)
    for name, read in (("arguments", json.loads), ("action_id", int)):
        if isinstance(data.get(name), str):
            with suppress(ValueError):
                data[name] = read(data[name])
    return deserialize_action(data, action_cls)
