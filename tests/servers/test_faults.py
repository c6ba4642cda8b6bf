"""A request with any number of faults is refused with a short error, on every route."""

import json
from typing import Any

import pytest
from counter import Counter
from pydantic import BaseModel
from server_apps import app_of
from serving import ask, request, serving, socket_to

from openenv_core import Action
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.frames import RequestDecoder, validate

PAGE = 100_000
KEYS = ",".join(f'"{number}":1' for number in range(50_000))
LONG = "x" * 500_000


def filled(pattern: str) -> str:
    """Replace KEYS and LONG in a pattern."""
    return pattern.replace("KEYS", KEYS).replace("LONG", LONG)


FRAMES = {
    "unknown keys": '{"type":"step","data":{KEYS}}',
    "unknown keys of the frame": '{"type":"state",KEYS}',
    "a long value": '{"type":"step","data":{"amount":"LONG"}}',
    "a long value beside what is missing": '{"type":"step","data":{"other":"LONG"}}',
    "a long key": '{"type":"step","data":{"LONG":1}}',
    "a long type": '{"type":"LONG"}',
    "a long method": '{"type":"mcp","data":{"jsonrpc":"2.0","method":"LONG"}}',
    "unknown keys of a request": '{"type":"mcp","data":{KEYS}}',
    "a long id": '{"type":"mcp","data":{"jsonrpc":"2.0","method":"openenv/session/close",'
    '"params":{"session_id":"LONG"}}}',
}


async def test_frame_with_many_faults_gets_a_short_reply_and_its_session_stays() -> None:
    async with serving(app_of(Counter)) as address, socket_to(address, max_size=PAGE) as client:
        for name, frame in FRAMES.items():
            reply = await ask(client, filled(frame))
            assert reply["type"] == ("mcp" if '"mcp"' in frame else "error"), name
            assert (await ask(client, {"type": "reset"}))["type"] == "observation"


async def test_body_with_many_faults_gets_a_short_reply() -> None:
    async with serving(app_of(Counter)) as address:
        for path, body in (
            ("/reset", '{"seed":"LONG"}'),
            ("/step", "{KEYS}"),
            ("/step", '{"action":{KEYS}}'),
            ("/step", '["LONG"]'),
            ("/step", '{"action":{"LONG":1}}'),
            ("/counter/tasks", "{KEYS}"),
            ("/counter/tasks", '{"split":["LONG"]}'),
            ("/mcp", "{KEYS}"),
            ("/mcp", '{"jsonrpc":"2.0","id":1,"method":"LONG"}'),
        ):
            reply = await request(address, "POST", path, filled(body))
            assert reply.status_code == (200 if path == "/mcp" else 422), body
            assert len(reply.content) < PAGE, body


async def test_many_faults_are_only_counted() -> None:
    async with serving(app_of(Counter)) as address, socket_to(address) as client:
        few = {str(number): 1 for number in range(31)}
        faults = (await ask(client, {"type": "step", "data": few}))["data"]["errors"]
        assert [fault["loc"] for fault in faults] == [["amount"], *([key] for key in few)]
        assert faults[1]["input"] == 1
        (only,) = (await ask(client, {"type": "step", "data": {**few, "one more": 1}}))["data"]["errors"]
        assert only["type"] == "too_many_faults"
        assert "33 faults" in only["msg"]


class Deep(BaseModel):
    inner: "dict[str, Deep | int]"


class Nested(Action):
    deep: Deep


def test_location_of_a_deep_fault_is_truncated() -> None:
    body: Any = {"inner": 1}
    for _ in range(60):
        body = {"inner": {"k" * 5_000: body}}
    with pytest.raises(RefusalError) as caught:
        validate(Deep, body, len(json.dumps(body)))
    assert len(json.dumps(caught.value.extra)) < PAGE


def test_faults_with_huge_locations_are_only_counted() -> None:
    faults = ",".join(f'"{number}":"x"' for number in range(8))
    key = "x" * 3_000_000
    frame = f'{{"type":"step","data":{{"deep":{{"inner":{{"{key}":{{"inner":{{{faults}}}}}}}}}}}}}'
    with pytest.raises(RefusalError) as caught:
        RequestDecoder(Nested).frame(frame)
    assert [fault["type"] for fault in caught.value.extra["errors"]] == ["too_many_faults"]
