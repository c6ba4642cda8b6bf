"""Frames as values and as bytes: encoding round-trips, and any input is read or refused with a typed error."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from fuzzing import EXAMPLES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from openenv_core import Action, Observation
from openenv_core.errors import ClientError
from openenv_core.protocol import errors as codes
from openenv_core.protocol import frames, jsonrpc
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.frames import (
    Mcp,
    RequestDecoder,
    Reset,
    encode_request,
    http_request,
    http_reset,
)
from openenv_core.protocol.jsonio import dumps, from_json
from openenv_core.protocol.jsonrpc import JsonRpcFaultError

MANY = settings(max_examples=6 * EXAMPLES)


class Deed(Action):
    number: int
    text: str = ""
    anything: Any = None
    data: bytes = b""


class Sight(Observation):
    text: str = ""
    anything: Any = None


class Strict(Action):
    level: int = Field(ge=0, le=10, strict=True)


DECODERS: list[RequestDecoder[Any]] = [
    RequestDecoder(Deed),
    RequestDecoder(Strict),
    RequestDecoder(Deed | Strict),  # type: ignore[arg-type]
    RequestDecoder(Deed, production=True),
]

TEXT = st.text(max_size=40)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
OBJECT = st.dictionaries(TEXT, VALUE, max_size=5)
KINDS = st.sampled_from(["reset", "step", "state", "mcp", "close", "observation", "error", ""]) | TEXT
FRAMES = st.fixed_dictionaries({}, optional={"type": KINDS | VALUE, "data": OBJECT | VALUE, "more": VALUE})
ANY_TEXT = st.text() | VALUE.map(json.dumps) | FRAMES.map(json.dumps)
BODIES = st.binary() | ANY_TEXT.map(lambda text: text.encode("utf-8", "surrogatepass"))


# Requests


@MANY
@given(st.integers(), TEXT, VALUE, st.binary(max_size=40), st.dictionaries(TEXT, VALUE, max_size=3))
def test_step_round_trips(
    number: int, text: str, anything: Any, data: bytes, metadata: dict[str, Any]
) -> None:
    deed = Deed(number=number, text=text, anything=anything, data=data, metadata=metadata)
    read = DECODERS[0].frame(encode_request("step", deed).decode())
    assert read.model_copy(update={"data": deed.data}) == deed
    # Bytes are base64 text on the wire, and the model says what it makes of them.
    assert from_json(encode_request("step", deed))["data"]["number"] == number


@MANY
@given(
    st.fixed_dictionaries(
        {},
        optional={"seed": st.integers(0, 1 << 62) | st.none(), "episode_id": TEXT | st.none(), "own": VALUE},
    )
)
def test_reset_round_trips(options: dict[str, Any]) -> None:
    assert DECODERS[0].frame(encode_request("reset", options).decode()) == Reset(options)
    assert http_reset(dumps(options)) == options


@MANY
@given(OBJECT)
def test_mcp_frame_round_trips(request: dict[str, Any]) -> None:
    for decoder in DECODERS:
        assert decoder.frame(encode_request("mcp", request).decode()) == Mcp(request)


def refused(read: Callable[..., Any], *arguments: Any) -> Any:
    """Return the error that was raised; None if there was none."""
    try:
        read(*arguments)
    except (RefusalError, JsonRpcFaultError, ClientError) as refusal:
        return refusal
    return None


@MANY
@given(ANY_TEXT)
def test_any_text_is_a_request_or_a_named_refusal(text: str) -> None:
    for decoder in DECODERS:
        refusal = refused(decoder.frame, text)
        assert _is_json(text) == (refusal is None or refusal.code != codes.INVALID_JSON)
        if refusal is not None:
            assert refusal.code in (codes.INVALID_JSON, codes.UNKNOWN_TYPE, codes.VALIDATION_ERROR)
            frame = json.loads(frames.encode_error(refusal.code, refusal.message, refusal.extra))
            assert frame["data"]["code"] == refusal.code


def _is_json(text: str) -> bool:
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError:
        return False
    return True


@MANY
@given(BODIES)
def test_any_body_is_a_request_or_a_named_refusal(body: bytes) -> None:
    for read in (http_reset, DECODERS[0].http_step, DECODERS[1].http_step):
        refusal = refused(read, body)
        if refusal is not None:
            assert refusal.code == codes.VALIDATION_ERROR
            for fault in json.loads(dumps(refusal.extra["errors"])):
                assert set(fault) >= {"type", "loc", "msg"}


@MANY
@given(BODIES)
def test_any_bytes_are_a_call_or_a_json_rpc_error(body: bytes) -> None:
    fault = refused(lambda: jsonrpc.read(jsonrpc.parse(body), len(body)))
    if fault is not None:
        assert fault.code in (jsonrpc.PARSE_ERROR, jsonrpc.INVALID_REQUEST)
        answer = json.loads(jsonrpc.encode_fault(None, fault))
        assert set(answer["error"]) == {"code", "message", "data"}


# Replies


@MANY
@given(
    TEXT,
    VALUE,
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.floats(),
    st.booleans(),
    st.dictionaries(TEXT, VALUE, max_size=3),
)
@example("", None, math.inf, False, {})
@example("", None, -math.inf, False, {})
@example("", None, math.nan, False, {})
def test_observation_round_trips(
    text: str, anything: Any, reward: Any, done: bool, metadata: dict[str, Any]
) -> None:
    sight = Sight(text=text, anything=anything, reward=reward, done=done, metadata=metadata)
    data = frames.decode_reply(frames.encode_observation(sight), "observation")
    expected_reward = None if isinstance(reward, float) and not math.isfinite(reward) else reward
    assert data["reward"] == expected_reward
    assert type(data["reward"]) is type(expected_reward)
    assert data["done"] is done
    assert data["observation"] == {"text": text, "anything": anything, "metadata": metadata}
    assert data.get("metadata", {}) == metadata
    assert ("metadata" in data) == bool(metadata)
    body = json.loads(frames.encode_http_result(sight))
    assert body["metadata"] == (metadata or None)
    assert body["reward"] == (None if expected_reward is None else float(expected_reward))
    assert isinstance(body["reward"], float | None)
    # What plain HTTP carries is a frame again at the client.
    request = http_request(encode_request("step", {}), "s")
    frame = frames.reply_frame(request.kind, frames.encode_http_result(sight))
    assert frames.decode_reply(frame, "observation") == body


@MANY
@given(BODIES, KINDS)
def test_any_reply_is_read_or_a_typed_error(frame: bytes, expected: str) -> None:
    refused(frames.decode_reply, frame, expected)  # what is raised beside typed errors fails the test


CODES = st.sampled_from([*(value for name, value in vars(codes).items() if name.isupper()), "", "NEW"])
LOOSE = st.fixed_dictionaries(
    {},
    optional={
        "code": CODES | VALUE,
        "message": TEXT | VALUE,
        "errors": st.lists(
            st.fixed_dictionaries({}, optional={"loc": VALUE, "msg": VALUE, "type": VALUE}) | VALUE
        )
        | VALUE,
        "active_sessions": VALUE,
        "max_sessions": VALUE,
        "factory_name": VALUE,
        "retry_after_s": VALUE,
    },
)


@MANY
@given(LOOSE)
def test_any_error_frame_is_a_typed_error(data: dict[str, Any]) -> None:
    with pytest.raises(ClientError) as raised:
        frames.decode_reply(dumps({"type": "error", "data": data}), "observation")
    assert str(raised.value)


@MANY
@given(
    st.integers(400, 599),
    st.binary() | LOOSE.map(dumps) | st.fixed_dictionaries({"detail": VALUE}).map(dumps),
)
def test_any_http_response_is_a_typed_error_or_a_protocol_error(status: int, body: bytes) -> None:
    frame = frames.error_frame(status, body, None)
    if frame is not None:
        with pytest.raises(ClientError):
            frames.decode_reply(frame, "observation")
