"""The wire: models, requests and replies as JSON, errors by name. For random values and bytes see tests/fuzz."""

import inspect
import re
from datetime import date
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from openenv_core import Action, ConcurrencyConfig, Observation, OpenEnvError, State, errors
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.frames import Close, ReadState, RequestDecoder, Reset, encode_request
from openenv_core.protocol.jsonio import dumps, reader
from openenv_core.tools import (
    RESERVED_TOOL_NAMES,
    CallToolAction,
    ListToolsAction,
    Tool,
    ToolError,
    ToolErrorType,
)

REFUSED: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (Action, {"extra": 1}),
    (Observation, {"extra": 1}),
    (State, {"step_count": -1}),
    (ConcurrencyConfig, {"max_concurrent_envs": 0}),
    (ConcurrencyConfig, {"session_timeout": 0}),
    (ConcurrencyConfig, {"extra": 1}),
    (ListToolsAction, {"tool_name": "add"}),
    (CallToolAction, {"tool_name": "add", "args": {}}),
    (Tool, {"name": "add", "description": "Adds.", "inputSchema": {}}),
    (ToolError, {"error_type": "unknown", "message": ""}),
]


def test_wire_models_refuse_unknown_fields_and_keep_the_type_of_a_reward() -> None:
    for model, refused in REFUSED:
        with pytest.raises(ValidationError):
            model.model_validate(refused)
    for reward in (True, 1, 0.5, None):
        back = Observation.model_validate_json(Observation(reward=reward).model_dump_json()).reward
        assert (type(back), back) == (type(reward), reward)
    assert type(Observation(reward=type("Worth", (float,), {})(0.5)).reward) is float
    kinds = {"execution_error", "invalid_args", "transport_error", "tool_not_found", "timeout"}
    assert {kind.value for kind in ToolErrorType} == kinds
    assert {"reset", "step", "state", "close"} == RESERVED_TOOL_NAMES


def test_requests_may_omit_data() -> None:
    frame = RequestDecoder(Action).frame
    assert isinstance(frame(encode_request("state").decode()), ReadState)
    assert isinstance(frame(encode_request("close").decode()), Close)
    assert frame(encode_request("reset").decode()) == frame('{"type":"reset","data":null}') == Reset({})


@pytest.mark.parametrize("head", ['{"type":"step","data":', '{"type": "step", "data": '])
@pytest.mark.parametrize(
    "rest",
    [
        '{"to":1}}',
        '{"to":1},"data":{"to":2}}',
        '{"to":1},"type":"state"}',
        '{"to":[1]}}',
        '{"to":1}',
        "}",
        "",
    ],
)
def test_what_begins_like_a_step_is_read_as_any_frame(head: str, rest: str) -> None:
    class Turn(Action):
        to: int

    def read(text: str) -> object:
        try:
            return RequestDecoder(Turn).frame(text)
        except RefusalError as error:
            return error.code, error.extra

    assert read(head + rest) == read(" " + head + rest)


def test_strict_models_are_read_as_json_and_unencodable_values_are_named() -> None:
    class Strict(Observation):
        model_config = ConfigDict(strict=True)
        day: date

    assert reader(Strict)({"day": "2026-01-02"}).day == date(2026, 1, 2)
    assert reader(Observation)({"done": True}).done is True
    with pytest.raises((TypeError, ValueError), match="got object"):
        dumps({"x": object()})


def test_error_tree_in_the_docstring_matches_the_classes() -> None:
    classes = {n: c for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, OpenEnvError)}
    drawn: dict[str, int] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^(    [│├└─ ]*)([A-Z]\w+)", line)
        if match:
            drawn[match[2]] = len(match[1])
    assert drawn.keys() == classes.keys()
    path: list[str] = []
    for name, indent in drawn.items():
        path = [p for p in path if drawn[p] < indent]
        assert not path or path[-1] in [base.__name__ for base in classes[name].__bases__]
        path.append(name)
