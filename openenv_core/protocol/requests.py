"""Frames from client to server in the released dialect: how they are written and how they are read."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictInt,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)
from pydantic_core import from_json

from openenv_core.protocol.errors import (
    INVALID_JSON,
    MAX_ECHO,
    UNKNOWN_TYPE,
    VALIDATION_ERROR,
    RefusalError,
    faults_of,
)
from openenv_core.protocol.jsonio import dumps, to_plain
from openenv_core.types import Action, ActT

ModelT = TypeVar("ModelT", bound=BaseModel)

# Clients, which only write requests, do without the models that read them.
_FORBID = ConfigDict(extra="forbid", defer_build=True)
_LEFT_IN_PRODUCTION = "mcp, close"
_TYPES = f"reset, step, state, {_LEFT_IN_PRODUCTION}"


class ResetOptions(BaseModel):
    """What a reset may carry. Further keys reach environments whose `reset` takes them."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    # What 64 bits hold: environments hand it on to generators that take no more.
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    episode_id: Annotated[str, Field(max_length=255)] | None = None


class StepOptions(BaseModel):
    """What an HTTP step may carry beside the action."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    action: dict[str, Any]
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    request_id: Annotated[str, Field(max_length=255)] | None = None


class _ResetFrame(BaseModel):
    model_config = _FORBID
    type: Literal["reset"]
    data: ResetOptions | None = None


class _StateFrame(BaseModel):
    model_config = _FORBID
    type: Literal["state"]


class _McpFrame(BaseModel):
    model_config = _FORBID
    type: Literal["mcp"]
    data: dict[str, Any]


class _CloseFrame(BaseModel):
    model_config = _FORBID
    type: Literal["close"]


RequestId: TypeAlias = Annotated[StrictInt, Field(ge=0, lt=2**53)]


class RequestHead(BaseModel):
    """What every request of `ropewalk.v1` may have.

    Attributes:
        id: Of the client's choice; every frame that answers has it.
        read: How many frames the client has read.
        deadline_s: Seconds after which it is not begun any more.
    """

    model_config = _FORBID

    id: RequestId
    read: RequestId | None = None
    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class NumberedFrame(RequestHead):
    """A frame of the released dialect that has an id, for one session of its connection.

    Attributes:
        member: The number of the session.
        traceparent: The span of the client's that it belongs to, as W3C's Trace Context has it.
    """

    member: Annotated[StrictInt, Field(ge=0)] = 0
    traceparent: Annotated[str, Field(max_length=64)] | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """Start an episode."""

    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Mcp:
    """A JSON-RPC request."""

    request: dict[str, Any]


class ReadState:
    """Ask where the episode stands."""


class Close:
    """End the session."""


READ_STATE = ReadState()
CLOSE = Close()

Request: TypeAlias = ActT | Reset | ReadState | Mcp | Close


class RequestDecoder(Generic[ActT]):
    """Reads frames, and the actions of HTTP bodies, straight into one action model.

    Args:
        action_type: The action model, or a union of several.
        production: Reset, step and state are unknown.
    """

    def __init__(self, action_type: type[ActT], production: bool = False) -> None:
        read = _union_of(action_type)
        build: Any = create_model  # its overloads do not know types made at run time
        step: Any = build("_StepFrame", __config__=_FORBID, type=(Literal["step"], ...), data=(read, ...))
        kinds = (
            [_McpFrame, _CloseFrame]
            if production
            else [step, _ResetFrame, _StateFrame, _McpFrame, _CloseFrame]
        )
        self._types = _LEFT_IN_PRODUCTION if production else _TYPES
        self._read_frame = _one_of(kinds)
        self._read_numbered = _one_of(
            [build(kind.__name__, __base__=(NumberedFrame, kind)) for kind in kinds]
        )
        self._read_action = TypeAdapter(read).validator.validate_json
        several: Any = list[read]  # type: ignore[valid-type]  # made at run time
        self._read_actions = TypeAdapter(several).validator.validate_json
        whole = build("_StepBody", __base__=StepOptions, action=(read, ...))
        self._read_step = TypeAdapter(whole).validator.validate_json

    def frame(self, text: str) -> "Request[ActT]":
        """Read one text frame; a step is returned as its action.

        Raises:
            RefusalError: INVALID_JSON, UNKNOWN_TYPE or VALIDATION_ERROR.
        """
        frame = self._read(self._read_frame, text)
        return frame.data if frame.type == "step" else _request_of(frame)

    def numbered_frame(self, text: str) -> "tuple[NumberedFrame, Request[ActT]]":
        """Read one text frame that has an id. RefusalError: As `frame`."""
        frame = self._read(self._read_numbered, text)
        return frame, frame.data if frame.type == "step" else _request_of(frame)

    def _read(self, read: Callable[[str], Any], text: str) -> Any:
        if "NaN" in text or "Infinity" in text:
            _require_json(text)
        try:
            return read(text)
        except ValidationError as error:
            raise _refusal(error, self._types, len(text)) from None

    def http_step(self, body: bytes) -> tuple[ActT, dict[str, Any]]:
        """Read the body of an HTTP step: the action and the options beside it.

        The oldest clients send the action by itself.

        Raises:
            RefusalError: VALIDATION_ERROR.
        """
        if b"NaN" not in body and b"Infinity" not in body:
            with suppress(ValidationError):
                step = self._read_step(body)
                return step.action, {name: getattr(step, name) for name in step.model_fields_set - {"action"}}
        # An action by itself, or a fault: which one is told as the released server tells it, of one part at a time.
        data = read_json(body)
        if isinstance(data, dict) and data and "action" not in data:
            with suppress(RefusalError):
                return self.action(data, len(body)), {}
        step = validate(StepOptions, data, len(body))
        return self.action(step.action, len(body)), {
            name: getattr(step, name) for name in step.model_fields_set if name != "action"
        }

    def action(self, data: dict[str, Any], size: int) -> ActT:
        """Read the action of an HTTP step, out of a body of this size.

        Raises:
            RefusalError: VALIDATION_ERROR; the places of its errors start inside the action.
        """
        return self._action(dumps(data), size)

    def actions(self, rows: list[bytes], size: int) -> list[ActT | Exception]:
        """Read many actions in JSON, out of a frame of this size; of one that cannot be read the error is returned.

        That is a RefusalError, or whatever a validator of the author's has raised.
        """
        try:
            return self._read_actions(b"[%b]" % b",".join(rows))  # type: ignore[no-any-return]
        except Exception:
            return [self._action_or_error(row, size) for row in rows]

    def _action(self, text: bytes, size: int) -> ActT:
        try:
            return self._read_action(text)  # type: ignore[no-any-return]
        except ValidationError as error:
            raise RefusalError(
                VALIDATION_ERROR, "Invalid message", {"errors": faults_of(error, size)}
            ) from None

    def _action_or_error(self, text: bytes, size: int) -> ActT | Exception:
        try:
            return self._action(text, size)
        except Exception as error:
            return error


def _request_of(frame: Any) -> "Request[Any]":
    """Return what a frame asks for that is no step."""
    match frame.type:
        case "reset":
            return Reset(given_options(frame.data))
        case "state":
            return READ_STATE
        case "mcp":
            return Mcp(frame.data)
    return CLOSE


def _one_of(kinds: list[Any]) -> Callable[[str], Any]:
    """Return what reads the text of a frame that is of one of these kinds, as its type says."""
    several: Any = Annotated[Union[tuple(kinds)], Field(discriminator="type")]  # noqa: UP007 - made at run time
    return TypeAdapter(several).validator.validate_json


def _union_of(action_type: Any) -> Any:
    """Return what reads the actions of a server.

    A server that was given one of the actions of tools, or the base of all, takes both actions of tools: released
    folders name one of them and mean both. A model with a `model_validate` of its own is read by that.
    """
    # The models of tools, which a client that only writes requests does without.
    from openenv_core.tools.wire import CallToolAction, ListToolsAction

    of_tools: dict[Any, type[Action]] = {"list_tools": ListToolsAction, "call_tool": CallToolAction}

    def either(value: Any, own: ValidatorFunctionWrapHandler) -> Any:
        tool_action = of_tools.get(value.get("type")) if isinstance(value, dict) else None
        return own(value) if tool_action is None else tool_action.model_validate(value)

    if any(action_type is one for one in (Action, *of_tools.values())):
        return Annotated[action_type, WrapValidator(either)]
    if isinstance(action_type, type) and issubclass(action_type, BaseModel):
        read = getattr(action_type.model_validate, "__func__", None)
        if read is not getattr(BaseModel.model_validate, "__func__", None):
            return Annotated[Any, PlainValidator(action_type.model_validate)]
    return action_type


def http_reset(body: bytes) -> dict[str, Any]:
    """Read the body of an HTTP reset, which may be empty. RefusalError: VALIDATION_ERROR."""
    return given_options(validate(ResetOptions, read_json(body), len(body)) if body else None)


def read_json(body: bytes) -> Any:
    """Read the JSON of an HTTP body: NaN and what is nested too deeply are refused like any other fault.

    Raises:
        RefusalError: VALIDATION_ERROR.
    """
    if not body:
        raise _fault("missing", [], "Field required", None)
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        why = str(error)
        raise _fault("json_invalid", [_position(body, why)], f"JSON decode error: {why}", {}) from None


def validate(model: type[ModelT], data: Any, size: int) -> ModelT:
    """Read a body into a model, which has been parsed, and was of this size.

    Raises:
        RefusalError: VALIDATION_ERROR; the places of its errors start at the body.
    """
    if not isinstance(data, dict):
        # A model takes instances too, and would name another fault than the framework does.
        text = "Input should be a valid dictionary or object to extract fields from"
        raise _fault("model_attributes_type", [], text, data if size <= MAX_ECHO else None)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        errors = faults_of(error, size)
        for entry in errors:
            entry["loc"] = ["body", *entry["loc"]]
        raise RefusalError(VALIDATION_ERROR, "Invalid message", {"errors": errors}) from None


def invalid_body(why: str) -> RefusalError:
    """Return the refusal of a body that is no JSON."""
    return _fault("json_invalid", [], why, None)


def _fault(kind: str, place: list[Any], message: str, value: Any) -> RefusalError:
    entry = {"type": kind, "loc": ["body", *place], "msg": message, "input": value}
    return RefusalError(VALIDATION_ERROR, "Invalid message", {"errors": [entry]})


def _position(body: bytes, why: str) -> int:
    """Return the offset of a fault that the parser names by line and column."""
    match = re.search(r"line (\d+) column (\d+)$", why)
    if match is None:
        return 0
    line, column = int(match[1]), int(match[2])
    return sum(len(text) + 1 for text in body.split(b"\n", line - 1)[: line - 1]) + column


def given_options(options: ResetOptions | None) -> dict[str, Any]:
    """Return the options that the caller gave, and only those."""
    return {} if options is None else {name: getattr(options, name) for name in options.model_fields_set}


def _require_json(text: str) -> None:
    """Refuse NaN and the infinities, which the parser takes for numbers and JSON does not."""
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise _invalid_json(str(error)) from None


def _invalid_json(why: str) -> RefusalError:
    return RefusalError(INVALID_JSON, f"expected a JSON object, got text that does not parse: {why}")


def _refusal(error: ValidationError, types: str, size: int) -> RefusalError:
    errors = faults_of(error, size)
    kind, message = errors[0]["type"], errors[0]["msg"]
    if kind == "json_invalid":
        return _invalid_json(message)
    # A union that stands deeper is the action's own, or a part of it.
    if kind in ("union_tag_invalid", "union_tag_not_found") and not errors[0]["loc"]:
        return RefusalError(UNKNOWN_TYPE, f"expected a frame whose type is one of {types}: {message}")
    for entry in errors:
        place = entry["loc"][1:]  # without the frame's type, which the union puts first
        entry["loc"] = place[1:] if place[:1] == ["data"] and len(place) > 1 else place
    return RefusalError(VALIDATION_ERROR, "Invalid message", {"errors": errors})


def encode_request(kind: str, data: Any = None) -> bytes:
    """Write one frame; `data` is a model, or any plain value; None leaves the key out."""
    if data is None:
        return b'{"type":"%b"}' % kind.encode()
    if isinstance(data, BaseModel):
        body = data.__pydantic_serializer__.to_json(data, fallback=to_plain, warnings=False)
    else:
        body = dumps(data)
    return b'{"type":"%b","data":%b}' % (kind.encode(), body)
