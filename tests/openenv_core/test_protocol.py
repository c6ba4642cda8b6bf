import json
import math
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ConfigDict

from openenv_core import Action, Observation
from openenv_core.protocol.jsonio import dumps, reader
from openenv_core.protocol.replies import decode_reply, encode_error, encode_http_result, encode_observation
from openenv_core.protocol.requests import Close, ReadState, RequestDecoder, Reset, encode_request


class Say(Action):
    text: str = ""
    payload: bytes = b""
    anything: Any = None


class Heard(Observation):
    text: str = ""
    payload: bytes = b""
    anything: Any = None


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
).filter(lambda value: "inf" not in repr(value))
TEXT = st.text()
REWARD = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats()


@given(TEXT, st.binary(), PLAIN)
def test_actions_survive_the_wire(text: str, payload: bytes, anything: Any) -> None:
    action = Say(text=text, payload=payload, anything=anything, metadata={"k": text})
    assert RequestDecoder(Say).frame(encode_request("step", action).decode()) == action


@given(TEXT, st.binary(), PLAIN, REWARD, st.booleans())
def test_observations_survive_the_wire(
    text: str, payload: bytes, anything: Any, reward: Any, done: bool
) -> None:
    observation = Heard(text=text, payload=payload, anything=anything, reward=reward, done=done)
    data = decode_reply(encode_observation(observation), "observation")
    finite = reward is None or math.isfinite(reward)
    assert data["done"] is done
    assert type(data["reward"]) is type(observation.reward if finite else None)
    assert "metadata" not in data
    assert data["observation"].keys() == {"text", "payload", "anything", "metadata"}
    back = reader(Heard)({**data["observation"], "done": done, "reward": data["reward"]})
    assert back == observation.model_copy(update={"reward": observation.reward if finite else None})


@given(REWARD, st.dictionaries(st.text(), st.booleans(), max_size=2))
def test_http_results(reward: Any, metadata: dict[str, bool]) -> None:
    body = json.loads(encode_http_result(Heard(reward=reward, metadata=metadata)))
    assert body["metadata"] == (metadata or None)
    assert body["reward"] is None or isinstance(body["reward"], float)


def test_requests_without_data() -> None:
    decoder = RequestDecoder(Say)
    assert isinstance(decoder.frame(encode_request("state").decode()), ReadState)
    assert isinstance(decoder.frame(encode_request("close").decode()), Close)
    assert decoder.frame(encode_request("reset").decode()) == Reset({})
    assert decoder.frame(encode_request("reset", {"seed": 1, "sab": True}).decode()) == Reset(
        {"seed": 1, "sab": True}
    )
    assert decoder.frame('{"type":"reset","data":null}') == Reset({})


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_fits_into_an_error(message: str) -> None:
    assert json.loads(encode_error("EXECUTION_ERROR", message))["data"]["code"] == "EXECUTION_ERROR"


def test_strict_models_are_read_as_json() -> None:
    class Strict(Observation):
        model_config = ConfigDict(strict=True)
        day: date

    assert reader(Strict)({"day": "2026-01-02"}).day == date(2026, 1, 2)
    assert reader(Observation)({"done": True}).done is True


def test_what_json_cannot_hold_is_named() -> None:
    with pytest.raises((TypeError, ValueError), match="got object"):
        dumps({"x": object()})
