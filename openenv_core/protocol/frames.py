"""Requests and replies of the released dialect, as frames and as bodies of HTTP; both ends encode and decode here."""

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    StrictInt,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)
from pydantic_core import from_json

from openenv_core.errors import (
    CapacityError,
    ExecutionError,
    FactoryError,
    NotExecutedError,
    ProtocolError,
    ServerError,
    SessionError,
    ValidationFailedError,
)
from openenv_core.outcomes import INFRASTRUCTURE_ERROR, TERMINATED, TRUNCATED, UNSCORED
from openenv_core.protocol.errors import (
    CAPACITY_REACHED,
    EXECUTION_ERROR,
    FACTORY_ERROR,
    INVALID_JSON,
    MAX_ECHO,
    NOT_EXECUTED,
    SESSION_ERROR,
    UNKNOWN_TYPE,
    VALIDATION_ERROR,
    RefusalError,
    faults_of,
    invalid_message,
)
from openenv_core.protocol.jsonio import dumps, to_plain
from openenv_core.types import Action, ActT, Observation

ModelT = TypeVar("ModelT", bound=BaseModel)

# defer_build: clients only encode requests and never need the validators.
_FORBID = ConfigDict(extra="forbid", defer_build=True)
_LEFT_IN_PRODUCTION = "mcp, close"
_TYPES = f"reset, step, state, {_LEFT_IN_PRODUCTION}"
_STEP_HEADS: Final = ('{"type":"step","data":', '{"type": "step", "data": ')
"""How nearly all steps begin: as our encoder writes them, and as `json.dumps` does."""


_OF_ONE: Final = "<an action>"
_OF_SEATS: Final = "<actions by seat>"
"""Tags of a step's data, which pydantic puts into the locations of errors."""


class ResetOptions(BaseModel):
    """Options of a reset. Further keys are passed to environments whose `reset` takes them."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    # 64 bits, because environments pass it to random generators that take no more.
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    episode_id: Annotated[str, Field(max_length=255)] | None = None


class StepOptions(BaseModel):
    """Body of an HTTP step: the action and further options."""

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
    """Fields of every request of `ropewalk.v1`.

    Attributes:
        id: Chosen by the client; its replies have the same.
        read: Number of frames that the client has read.
        deadline_s: Seconds after which the request is not started any more.
    """

    model_config = _FORBID

    id: RequestId
    read: RequestId | None = None
    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class NumberedFrame(RequestHead):
    """A frame of the released dialect with an id, for one session of its connection.

    Attributes:
        member: Number of the session.
        traceparent: W3C Trace Context of the client's span.
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
    """Return the state of the episode."""


class Close:
    """End the session."""


READ_STATE = ReadState()
CLOSE = Close()

Request: TypeAlias = ActT | Reset | ReadState | Mcp | Close


class RequestDecoder(Generic[ActT]):
    """Decodes frames and HTTP bodies, validating actions into one model.

    Args:
        action_type: The action model, or a union of models.
        production: Whether reset, step and state are rejected as unknown.
        seat_actions: The model of actions for several seats at once, which have a field `seats`; None for an
            environment of one player.
    """

    def __init__(
        self, action_type: type[ActT], production: bool = False, seat_actions: type[BaseModel] | None = None
    ) -> None:
        read = _union_of(action_type)
        self._read_actions = _make_list_reader(read)
        self._read_seat_actions = self._read_actions
        if seat_actions is not None:
            self._read_seat_actions = _make_list_reader(seat_actions)
            read = Annotated[
                Annotated[read, Tag(_OF_ONE)] | Annotated[seat_actions, Tag(_OF_SEATS)],
                Discriminator(_tag_of),
            ]
        build: Any = create_model  # its overloads do not support types made at run time
        step: Any = build("_StepFrame", __config__=_FORBID, type=(Literal["step"], ...), data=(read, ...))
        kinds = (
            [_McpFrame, _CloseFrame]
            if production
            else [step, _ResetFrame, _StateFrame, _McpFrame, _CloseFrame]
        )
        self._types = _LEFT_IN_PRODUCTION if production else _TYPES
        self._step_heads = () if production else _STEP_HEADS
        self._read_frame = _make_reader(kinds)
        self._read_numbered = _make_reader(
            [build(kind.__name__, __base__=(NumberedFrame, kind)) for kind in kinds]
        )
        self._read_action = TypeAdapter(read).validator.validate_json
        step_body = build("_StepBody", __base__=StepOptions, action=(read, ...))
        self._read_step = TypeAdapter(step_body).validator.validate_json

    def frame(self, text: str) -> "Request[ActT]":
        """Decode a text frame; a step is returned as its action.

        Raises:
            RefusalError: INVALID_JSON, UNKNOWN_TYPE or VALIDATION_ERROR.
        """
        if "NaN" in text or "Infinity" in text:
            _require_json(text)
        for head in self._step_heads:
            if text.startswith(head) and text[-1] == "}":
                # If what is between is the JSON of an action, the frame is a step: in half the time.
                try:
                    return self._read_action(text[len(head) : -1])  # type: ignore[no-any-return]
                except ValidationError:
                    break
        try:
            frame = self._read_frame(text)
        except ValidationError as error:
            raise _refusal(error, self._types, len(text)) from None
        return frame.data if frame.type == "step" else _request_of(frame)

    def numbered_frame(self, text: str) -> "tuple[NumberedFrame, Request[ActT]]":
        """Decode a text frame with an id. Raises as `frame` does."""
        if "NaN" in text or "Infinity" in text:
            _require_json(text)
        try:
            frame = self._read_numbered(text)
        except ValidationError as error:
            raise _refusal(error, self._types, len(text)) from None
        return frame, frame.data if frame.type == "step" else _request_of(frame)

    def http_step(self, body: bytes) -> tuple[ActT, dict[str, Any]]:
        """Decode the body of an HTTP step to the action and the other options.

        The oldest clients send only the action, without an envelope.

        Raises:
            RefusalError: VALIDATION_ERROR.
        """
        if b"NaN" not in body and b"Infinity" not in body:
            with suppress(ValidationError):
                options = given_options(self._read_step(body))
                return options.pop("action"), options
        # An action without envelope, or an error, reported as the released server does: the envelope first.
        data = read_json(body)
        if isinstance(data, dict) and data and "action" not in data:
            with suppress(RefusalError):
                return self.action(data, len(body)), {}
        options = given_options(validate(StepOptions, data, len(body)))
        return self.action(options.pop("action"), len(body)), options

    def action(self, data: dict[str, Any], size: int) -> ActT:
        """Validate the action of an HTTP step; `size` is the length of the body.

        Raises:
            RefusalError: VALIDATION_ERROR; the `loc` of its errors is relative to the action.
        """
        return self._action(dumps(data), size)

    def actions(self, rows: list[bytes], size: int) -> list[ActT | Exception]:
        """Validate many actions in JSON; `size` is the length of the frame.

        In place of an invalid action the list has its error: a RefusalError, or whatever an author's validator raised.
        """
        # Which of the two is decided once: for a union it would take as long as the rest.
        are_of_seats = bool(rows) and rows[0].startswith(b'{"seats":')
        try:
            read = self._read_seat_actions if are_of_seats else self._read_actions
            return read(b"[%b]" % b",".join(rows))  # type: ignore[no-any-return]
        except Exception:
            return [self._action_or_error(row, size) for row in rows]

    def _action(self, text: bytes, size: int) -> ActT:
        try:
            return self._read_action(text)  # type: ignore[no-any-return]
        except ValidationError as error:
            raise invalid_message(_faults_of(error, size)) from None

    def _action_or_error(self, text: bytes, size: int) -> ActT | Exception:
        try:
            return self._action(text, size)
        except Exception as error:
            return error


def _tag_of(action: Any) -> str:
    # An action's own field `seats` may be of another type.
    return _OF_SEATS if isinstance(action, dict) and isinstance(action.get("seats"), dict) else _OF_ONE


def _faults_of(error: ValidationError, size: int) -> list[dict[str, Any]]:
    faults = faults_of(error, size)
    for fault in faults:
        fault["loc"] = [part for part in fault["loc"] if part not in (_OF_ONE, _OF_SEATS)]
    return faults


def _request_of(frame: Any) -> "Request[Any]":
    """Return the request of a frame other than a step."""
    match frame.type:
        case "reset":
            return Reset(given_options(frame.data))
        case "state":
            return READ_STATE
        case "mcp":
            return Mcp(frame.data)
    return CLOSE


def _make_list_reader(kind: Any) -> Callable[[bytes], Any]:
    return TypeAdapter(list[kind]).validator.validate_json


def _make_reader(kinds: list[Any]) -> Callable[[str], Any]:
    """Return a validator of JSON text for frames of these kinds, distinguished by `type`."""
    union: Any = Annotated[Union[tuple(kinds)], Field(discriminator="type")]  # noqa: UP007 - made at run time
    return TypeAdapter(union).validator.validate_json


def _union_of(action_type: Any) -> Any:
    """Return the type that validates the actions of a server.

    A server whose action type is a tool action or `Action` accepts both tool actions: released environments name one
    and mean both. A model that overrides `model_validate` is validated by that.
    """
    # Imported here because clients, which only encode requests, do not need the tool models.
    from openenv_core.tools.wire import CallToolAction, ListToolsAction

    tool_actions: dict[Any, type[Action]] = {"list_tools": ListToolsAction, "call_tool": CallToolAction}

    def validate_either(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        tool_action = tool_actions.get(value.get("type")) if isinstance(value, dict) else None
        return handler(value) if tool_action is None else tool_action.model_validate(value)

    if any(action_type is one for one in (Action, *tool_actions.values())):
        return Annotated[action_type, WrapValidator(validate_either)]
    if isinstance(action_type, type) and issubclass(action_type, BaseModel):
        read = getattr(action_type.model_validate, "__func__", None)
        if read is not getattr(BaseModel.model_validate, "__func__", None):
            return Annotated[Any, PlainValidator(action_type.model_validate)]
    return action_type


def http_reset(body: bytes) -> dict[str, Any]:
    """Decode the body of an HTTP reset, which may be empty. Raises `RefusalError` with VALIDATION_ERROR."""
    return given_options(validate(ResetOptions, read_json(body), len(body)) if body else None)


def read_json(body: bytes) -> Any:
    """Parse the JSON of an HTTP body. NaN and excessive nesting are errors too.

    Raises:
        RefusalError: VALIDATION_ERROR.
    """
    if not body:
        raise _fault("missing", [], "Field required", None)
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        reason = str(error)
        raise _fault("json_invalid", [_position(body, reason)], f"JSON decode error: {reason}", {}) from None


def validate(model: type[ModelT], data: Any, size: int) -> ModelT:
    """Validate a parsed body as a model; `size` is the length of its JSON.

    Raises:
        RefusalError: VALIDATION_ERROR; the `loc` of its errors starts with "body".
    """
    if not isinstance(data, dict):
        # pydantic also accepts instances, and would report another error than FastAPI does.
        text = "Input should be a valid dictionary or object to extract fields from"
        raise _fault("model_attributes_type", [], text, data if size <= MAX_ECHO else None)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        errors = faults_of(error, size)
        for entry in errors:
            entry["loc"] = ["body", *entry["loc"]]
        raise invalid_message(errors) from None


def invalid_body(reason: str) -> RefusalError:
    """Return the error for a body that is not JSON."""
    return _fault("json_invalid", [], reason, None)


def _fault(kind: str, location: list[Any], message: str, value: Any) -> RefusalError:
    return invalid_message([{"type": kind, "loc": ["body", *location], "msg": message, "input": value}])


def _position(body: bytes, reason: str) -> int:
    """Return the offset of a parse error, which the parser gives as line and column."""
    match = re.search(r"line (\d+) column (\d+)$", reason)
    if match is None:
        return 0
    line, column = int(match[1]), int(match[2])
    return sum(len(text) + 1 for text in body.split(b"\n", line - 1)[: line - 1]) + column


def given_options(options: ResetOptions | StepOptions | None) -> dict[str, Any]:
    """Return only the options that the caller set."""
    return {} if options is None else {name: getattr(options, name) for name in options.model_fields_set}


def _require_json(text: str) -> None:
    """Reject NaN and infinities, which the parser accepts but JSON does not allow."""
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise _invalid_json(str(error)) from None


def _invalid_json(reason: str) -> RefusalError:
    return RefusalError(INVALID_JSON, f"expected a JSON object, got text that does not parse: {reason}")


def _refusal(error: ValidationError, types: str, size: int) -> RefusalError:
    errors = _faults_of(error, size)
    kind, message = errors[0]["type"], errors[0]["msg"]
    if kind == "json_invalid":
        return _invalid_json(message)
    # A union below the top level belongs to the action.
    if kind in ("union_tag_invalid", "union_tag_not_found") and not errors[0]["loc"]:
        return RefusalError(UNKNOWN_TYPE, f"expected a frame whose type is one of {types}: {message}")
    for entry in errors:
        location = entry["loc"][1:]  # without the frame's type, which the union prepends
        entry["loc"] = location[1:] if location[:1] == ["data"] and len(location) > 1 else location
    return invalid_message(errors)


def encode_request(kind: str, data: Any = None) -> bytes:
    """Encode a frame; `data` is a model or plain value; None omits the key."""
    if data is None:
        return b'{"type":"%b"}' % kind.encode()
    if isinstance(data, BaseModel):  # not by `encode_model`: each step comes here
        body = data.__pydantic_serializer__.to_json(data, fallback=to_plain, warnings=False)
    else:
        body = dumps(data)
    return b'{"type":"%b","data":%b}' % (kind.encode(), body)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The HTTP request that corresponds to a frame."""

    kind: str  # the frame's type
    method: str
    path: str
    body: bytes | None = None
    is_sessionless: bool = False  # refers to no session


def http_request(frame: bytes, session_id: str, has_session: bool = True) -> HttpRequest:
    """Return the HTTP request that corresponds to a frame of `encode_request`.

    Args:
        frame: The frame as it would be sent on a WebSocket.
        session_id: Id of the client's session.
        has_session: Whether the session is already open on the server. Tools can be listed before that.
    """
    # The data stays encoded: an action may be large.
    head, _, rest = frame.partition(b',"data":')
    kind, data = head[len(b'{"type":"') :].rstrip(b'"}').decode(), rest[:-1]
    match kind:
        case "reset":
            return HttpRequest(kind, "POST", "/reset", data or b"{}")
        case "step":
            return HttpRequest(kind, "POST", "/step", b'{"action":%b}' % (data or b"null"))
        case "state":
            return HttpRequest(kind, "GET", "/state")
        case "close":
            params = {"session_id": session_id}
            call = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/close", "params": params}
            return HttpRequest(kind, "POST", "/mcp", dumps(call))
        case "mcp":
            rpc: dict[str, Any] = from_json(data or b"{}")
            if has_session:
                rpc["params"] = {**rpc.get("params", {}), "session_id": session_id}
            return HttpRequest(kind, "POST", "/mcp", dumps(rpc), is_sessionless=not has_session)
    raise ValueError(f"expected a reset, step, state, mcp or close frame, got {kind!r}")


# Replies

_LIFTED: Final = {"reward", "done"}

_MARKS: Final = (TERMINATED, TRUNCATED, INFRASTRUCTURE_ERROR, UNSCORED)

_ERRORS: Mapping[str, type[ServerError]] = {
    INVALID_JSON: ValidationFailedError,
    UNKNOWN_TYPE: ValidationFailedError,
    VALIDATION_ERROR: ValidationFailedError,
    EXECUTION_ERROR: ExecutionError,
    CAPACITY_REACHED: CapacityError,
    FACTORY_ERROR: FactoryError,
    SESSION_ERROR: SessionError,
    NOT_EXECUTED: NotExecutedError,
}


def _scalar(value: Any) -> bytes:
    """Encode a reward or flag; common cases without a serialiser, for speed."""
    if value is None:
        return b"null"
    if value is False:
        return b"false"
    if value is True:
        return b"true"
    if type(value) is float:
        return repr(value).encode() if math.isfinite(value) else b"null"
    return dumps(value)


def encode_observation(observation: Observation, request_id: int | None = None) -> str:
    """Encode the reply to a reset or step, with the request's id if it has one. The reward keeps its JSON type.

    Raises:
        TypeError: The environment returned something other than an Observation.
        ValueError: JSON cannot hold the observation; includes pydantic's serialisation error.
    """
    body, metadata = encode_fields(observation)
    reward, done = observation.reward, observation.done
    # Common values without a call, for speed.
    is_float = type(reward) is float and math.isfinite(reward)
    reward_text = repr(reward) if is_float else _scalar(reward).decode()
    done_text = "false" if done is False else _scalar(done).decode()
    lifted = f',"metadata":{dumps(metadata).decode()}' if metadata else ""
    head = "" if request_id is None else f'"id":{request_id},'
    return (
        f'{{{head}"type":"observation","data":{{"observation":{body.decode()},"reward":{reward_text},'
        f'"done":{done_text}{lifted}}}}}'
    )


def encode_http_result(observation: Observation) -> bytes:
    """Encode the body of an HTTP reset or step: `metadata` is always present, the reward a float.

    Raises:
        TypeError: The environment returned something other than an Observation.
        ValueError: JSON cannot hold the observation.
    """
    body, metadata = encode_fields(observation)
    reward = observation.reward
    return b'{"observation":%b,"reward":%b,"done":%b,"metadata":%b}' % (
        body,
        _scalar(None if reward is None else float(reward)),
        _scalar(observation.done),
        dumps(metadata) if metadata else b"null",
    )


def encode_fields(observation: Any, exclude: set[str] = _LIFTED) -> tuple[bytes, dict[str, Any]]:
    """Encode an observation's fields without those in `exclude`; also return its metadata.

    Raises:
        TypeError: It is not an Observation.
        ValueError: JSON cannot hold it.
    """
    if not isinstance(observation, Observation):
        require_observation(observation)  # raises
    metadata: dict[str, Any] = observation.metadata
    if observation.truncated or observation.infrastructure_error or observation.unscored:
        metadata = metadata_of(observation)
        observation = observation.model_copy(update={"metadata": metadata})
    body = observation.__pydantic_serializer__.to_json(
        observation, exclude=exclude, fallback=to_plain, warnings=False
    )
    return body, metadata


def metadata_of(observation: Observation) -> dict[str, Any]:
    """Return the metadata to send, with the outcome's fields that are set, which released clients know nothing of.

    `terminated` is sent only beside `truncated`: otherwise it follows from `done`.
    """
    marks = {
        name: mark
        for name in _MARKS
        if (mark := getattr(observation, name)) and type(observation).model_fields[name].exclude is True
    }
    if TRUNCATED not in marks or TERMINATED not in observation.model_fields_set:
        marks.pop(TERMINATED, None)
    return {**observation.metadata, **marks}


def require_observation(value: object) -> Observation:
    """Return what an environment returned. Raises TypeError if that is not an Observation."""
    if not isinstance(value, Observation):
        raise TypeError(
            f"expected reset() and step() to return an Observation, got {type(value).__name__}; "
            "return an instance of the environment's observation class"
        )
    return value


def encode_state(state: BaseModel, request_id: int | None = None) -> str:
    """Encode the reply to a state request, with the request's id if it has one."""
    return _numbered((b'{"type":"state","data":%b}' % encode_model(state)).decode(), request_id)


def encode_model(model: BaseModel) -> bytes:
    """Encode a model as an HTTP body. Raises TypeError for other values."""
    if not isinstance(model, BaseModel):
        raise TypeError(
            f"expected a State, got {type(model).__name__}; return an instance of the state class"
        )
    return model.__pydantic_serializer__.to_json(model, fallback=to_plain, warnings=False)


def encode_error(
    code: str, message: str, extra: Mapping[str, Any] | None = None, request_id: int | None = None
) -> str:
    """Encode an error frame, with the request's id if it has one."""
    # Text of exceptions may contain lone surrogates, which UTF-8 cannot encode.
    clean = message.encode("utf-8", "replace").decode("utf-8")
    data = dumps({"message": clean, "code": code, **(extra or {})})
    return _numbered((b'{"type":"error","data":%b}' % data).decode(), request_id)


def encode_mcp(response: bytes, request_id: int | None = None) -> str:
    """Encode a frame with a JSON-RPC response, with the request's id if it has one."""
    return _numbered((b'{"type":"mcp","data":%b}' % response).decode(), request_id)


def _numbered(frame: str, request_id: int | None) -> str:
    return frame if request_id is None else f'{{"id":{request_id},{frame[1:]}'


def reply_frame(request_kind: str, body: bytes) -> bytes:
    """Return the frame for a response with status 200 to a request of a kind."""
    kind = request_kind if request_kind in ("state", "mcp") else "observation"
    return b'{"type":"%b","data":%b}' % (kind.encode(), body or b"null")


_STATUS_CODES: Final = {
    **dict.fromkeys((400, 413, 422), VALIDATION_ERROR),
    **dict.fromkeys((404, 504), SESSION_ERROR),
    **dict.fromkeys((429, 503), CAPACITY_REACHED),
    500: EXECUTION_ERROR,
}


def error_frame(status: int, body: bytes, retry_after_s: float | None) -> bytes | None:
    """Return the error frame for an unsuccessful response; None for a status without a corresponding frame.

    Args:
        status: The HTTP status.
        body: Usually `{"detail": ...}` with a text, a list of errors, or the data of an error frame.
        retry_after_s: Seconds from the response's Retry-After header.
    """
    detail = _detail(body)
    extra: dict[str, Any] = {}
    if (code := _STATUS_CODES.get(status)) is None:
        return None
    if code == VALIDATION_ERROR and isinstance(detail, list):
        extra["errors"] = [_strip_location(error) for error in detail]
        detail = "Invalid message"
    if code == CAPACITY_REACHED and retry_after_s is not None:
        extra["retry_after_s"] = retry_after_s
    if isinstance(detail, Mapping):
        detail_fields = {str(name): value for name, value in detail.items()}
        code, detail = str(detail_fields.pop("code", code)), detail_fields.pop("message", None)
        extra = {**detail_fields, **extra}
    text = detail if isinstance(detail, str) and detail else f"the server answered with HTTP {status}"
    return encode_error(code, text, extra).encode()


def detail_text(body: bytes) -> str:
    """Return the message of an unsuccessful response."""
    detail = _detail(body)
    if isinstance(detail, Mapping):
        detail = detail.get("message", detail)
    return detail if isinstance(detail, str) else dumps(detail).decode()


def is_from_server(body: bytes) -> bool:
    """Whether an unsuccessful response comes from our server, which sends a code, not from a proxy."""
    detail = _detail(body)
    return isinstance(detail, Mapping) and "code" in detail


def _detail(body: bytes) -> Any:
    try:
        parsed = from_json(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:500]
    return parsed.get("detail", parsed) if isinstance(parsed, dict) else parsed


def _strip_location(error: Any) -> Any:
    """Return a validation error with `loc` relative to the frame's data, not to the HTTP body."""
    if not isinstance(error, Mapping) or not isinstance(error.get("loc"), list):
        return error
    location = error["loc"]
    while location[:1] in (["body"], ["action"]) and len(location) > 1:
        location = location[1:]
    return {**error, "loc": location}


def decode_reply(frame: bytes | bytearray | str, expected: str) -> dict[str, Any]:
    """Decode a reply and return its data.

    Raises:
        ServerError: The reply is an error frame; its code determines the subclass.
        ProtocolError: It is not a reply of the OpenEnv protocol.
    """
    try:
        reply = from_json(frame)
    except ValueError as error:
        raise ProtocolError(f"expected a JSON {expected!r}, got {_excerpt(frame)}: {error}") from None
    return data_of(reply, expected)


def data_of(reply: Any, expected: str) -> dict[str, Any]:
    """Return the data of a parsed reply.

    Raises:
        ServerError: The reply is an error frame; its code determines the subclass.
        ProtocolError: It is not a reply of the OpenEnv protocol.
    """
    if isinstance(reply, dict):
        data = reply.get("data")
        if isinstance(data, dict):
            kind = reply.get("type")
            if kind == expected:
                return data
            if kind == "error":
                raise server_error(data)
    raise ProtocolError(
        f"expected a reply of type {expected!r}, got {_excerpt(dumps(reply).decode())}; "
        "check that the URL is an OpenEnv server's"
    )


def server_error(data: Mapping[str, Any]) -> ServerError:
    """Return the exception for the data of an error frame."""
    code = str(data.get("code") or "")
    return _ERRORS.get(code, ServerError)(
        str(data.get("message") or "the server gave no message"), code, data
    )


def _excerpt(frame: bytes | bytearray | str, limit: int = 200) -> str:
    return repr(frame[:limit])
