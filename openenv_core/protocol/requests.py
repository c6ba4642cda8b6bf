"""Frames from client to server in the released dialect: how they are written and how they are read."""

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic_core import ErrorDetails, from_json

from openenv_core.protocol.codes import INVALID_JSON, UNKNOWN_TYPE, VALIDATION_ERROR, Refusal
from openenv_core.protocol.jsonio import dumps, to_plain
from openenv_core.types import ActT

_FORBID = ConfigDict(extra="forbid")
_TYPES = "reset, step, state, mcp, close"


class ResetOptions(BaseModel):
    """What a reset may carry. Further keys reach environments whose `reset` takes them."""

    model_config = ConfigDict(extra="allow")

    seed: Annotated[int, Field(ge=0)] | None = None
    episode_id: Annotated[str, Field(max_length=255)] | None = None


class StepOptions(BaseModel):
    """What an HTTP step may carry beside the action."""

    model_config = ConfigDict(extra="allow")

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
    """

    def __init__(self, action_type: type[ActT]) -> None:
        build: Any = create_model  # its overloads do not know types made at run time
        step: Any = build(
            "_StepFrame", __config__=_FORBID, type=(Literal["step"], ...), data=(action_type, ...)
        )
        frame: Any = Annotated[
            step | _ResetFrame | _StateFrame | _McpFrame | _CloseFrame, Field(discriminator="type")
        ]
        self._read_frame = TypeAdapter(frame).validator.validate_json
        self._read_action = TypeAdapter(action_type).validator.validate_json

    def frame(self, text: str | bytes) -> "Request[ActT]":
        """Read one text frame; a step is returned as its action.

        Raises:
            Refusal: INVALID_JSON, UNKNOWN_TYPE or VALIDATION_ERROR.
        """
        try:
            frame = self._read_frame(text)
        except ValidationError as error:
            raise _refusal(error) from None
        kind = frame.type
        if kind == "step":
            return frame.data  # type: ignore[no-any-return]
        if kind == "reset":
            return Reset(reset_options(frame.data))
        if kind == "state":
            return READ_STATE
        if kind == "mcp":
            return Mcp(frame.data)
        return CLOSE

    def action(self, data: dict[str, Any]) -> ActT:
        """Read the action of an HTTP step.

        Raises:
            Refusal: VALIDATION_ERROR; the places of its errors start inside the action.
        """
        try:
            return self._read_action(dumps(data))  # type: ignore[no-any-return]
        except ValidationError as error:
            raise Refusal(VALIDATION_ERROR, "Invalid message", {"errors": plain_errors(error)}) from None


def reset_options(options: ResetOptions | None) -> dict[str, Any]:
    """Return the options that the caller gave, and only those."""
    if options is None:
        return {}
    return {name: getattr(options, name) for name in options.model_fields_set}


def _refusal(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return Refusal(INVALID_JSON, f"expected a JSON object, got text that does not parse: {first['msg']}")
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return Refusal(UNKNOWN_TYPE, f"expected a frame whose type is one of {_TYPES}: {first['msg']}")
    errors = plain_errors(error)
    for entry in errors:
        place = entry["loc"][1:]  # without the frame's type, which the union puts first
        entry["loc"] = place[1:] if place[:1] == ["data"] and len(place) > 1 else place
    return Refusal(VALIDATION_ERROR, "Invalid message", {"errors": errors})


def plain_errors(error: ValidationError) -> list[dict[str, Any]]:
    """Return the faults as plain JSON values.

    pydantic's own JSON form is used, because a validator's ValueError in `ctx` is not plain; inputs are
    left out where they cannot be written.
    """
    try:
        text = error.json(include_url=False)
    except Exception:
        text = error.json(include_url=False, include_input=False)
    errors: list[dict[str, Any]] = from_json(text)
    return errors


def plain_details(errors: list[ErrorDetails]) -> list[Any]:
    """Return error details, as a framework hands them out, as plain JSON values."""
    plain: list[Any] = from_json(
        dumps([{k: v for k, v in e.items() if k not in ("url", "ctx")} for e in errors])
    )
    return plain


def encode_request(kind: str, data: Any = None) -> bytes:
    """Write one frame; `data` is a model, or any plain value; None leaves the key out."""
    if data is None:
        return b'{"type":"%b"}' % kind.encode()
    if isinstance(data, BaseModel):
        body = data.__pydantic_serializer__.to_json(data, fallback=to_plain, warnings=False)
    else:
        body = dumps(data)
    return b'{"type":"%b","data":%b}' % (kind.encode(), body)
