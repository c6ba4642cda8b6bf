"""Frames from server to client in the released dialect, and the bodies of HTTP responses."""

import math
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel
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
from openenv_core.protocol import errors as codes
from openenv_core.protocol.jsonio import dumps, to_plain
from openenv_core.types import Observation

_LIFTED: Final = {"reward", "done"}

_MARKS: Final = (TERMINATED, TRUNCATED, INFRASTRUCTURE_ERROR, UNSCORED)

_ERRORS: Mapping[str, type[ServerError]] = {
    codes.INVALID_JSON: ValidationFailedError,
    codes.UNKNOWN_TYPE: ValidationFailedError,
    codes.VALIDATION_ERROR: ValidationFailedError,
    codes.EXECUTION_ERROR: ExecutionError,
    codes.CAPACITY_REACHED: CapacityError,
    codes.FACTORY_ERROR: FactoryError,
    codes.SESSION_ERROR: SessionError,
    codes.NOT_EXECUTED: NotExecutedError,
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


def encode_observation(observation: Observation) -> str:
    """Encode the reply to a reset or step. The reward keeps its JSON type.

    Raises:
        TypeError: The environment returned something other than an Observation.
        ValueError: JSON cannot hold the observation; includes pydantic's serialisation error.
    """
    body, metadata = encode_fields(observation)
    # Text from the start, and the common values without a call, for speed.
    reward, done = observation.reward, observation.done
    reward_text = (
        repr(reward) if type(reward) is float and math.isfinite(reward) else _scalar(reward).decode()
    )
    done_text = "false" if done is False else _scalar(done).decode()
    lifted = f',"metadata":{dumps(metadata).decode()}' if metadata else ""
    return (
        f'{{"type":"observation","data":{{"observation":{body.decode()},"reward":{reward_text},'
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


def encode_fields(observation: object, exclude: set[str] = _LIFTED) -> tuple[bytes, dict[str, Any]]:
    """Encode an observation's fields without those in `exclude`; also return its metadata.

    Raises:
        TypeError: It is not an Observation.
        ValueError: JSON cannot hold it.
    """
    if not isinstance(observation, Observation):
        observation = require_observation(observation)  # raises
    metadata = observation.metadata
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


def encode_state(state: BaseModel) -> str:
    """Encode the reply to a state request."""
    return (b'{"type":"state","data":%b}' % encode_model(state)).decode()


def encode_model(model: BaseModel) -> bytes:
    """Encode a model as an HTTP body. Raises TypeError for other values."""
    if not isinstance(model, BaseModel):
        raise TypeError(
            f"expected a State, got {type(model).__name__}; return an instance of the state class"
        )
    return model.__pydantic_serializer__.to_json(model, fallback=to_plain, warnings=False)


def encode_error(code: str, message: str, extra: Mapping[str, Any] | None = None) -> str:
    """Encode an error frame."""
    # Text of exceptions may contain lone surrogates, which UTF-8 cannot encode.
    clean = message.encode("utf-8", "replace").decode("utf-8")
    return (b'{"type":"error","data":%b}' % dumps({"message": clean, "code": code, **(extra or {})})).decode()


def encode_mcp(response: bytes) -> str:
    """Encode a frame with a JSON-RPC response."""
    return (b'{"type":"mcp","data":%b}' % response).decode()


def reply_frame(request_kind: str, body: bytes) -> bytes:
    """Return the frame for a response with status 200 to a request of a kind."""
    kind = request_kind if request_kind in ("state", "mcp") else "observation"
    return b'{"type":"%b","data":%b}' % (kind.encode(), body or b"null")


def error_frame(status: int, body: bytes, retry_after_s: float | None) -> bytes | None:
    """Return the error frame for an unsuccessful response; None for a status without a corresponding frame.

    Args:
        status: The HTTP status.
        body: Usually `{"detail": ...}` with a text, a list of errors, or the data of an error frame.
        retry_after_s: Seconds from the response's Retry-After header.
    """
    detail = _detail(body)
    extra: dict[str, Any] = {}
    match status:
        case 400 | 413 | 422:
            code = codes.VALIDATION_ERROR
            if isinstance(detail, list):
                extra["errors"] = [_strip_location(error) for error in detail]
                detail = "Invalid message"
        case 404:
            code = codes.SESSION_ERROR
        case 429 | 503:
            code = codes.CAPACITY_REACHED
            if retry_after_s is not None:
                extra["retry_after_s"] = retry_after_s
        case 500:
            code = codes.EXECUTION_ERROR
        case 504:
            code = codes.SESSION_ERROR
        case _:
            return None
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
