"""The wire: models, requests and replies as JSON, errors by name. For random values and bytes see tests/fuzz."""

import inspect
import re
from datetime import date
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from openenv_core import (
    Action,
    ConcurrencyConfig,
    EnvironmentMetadata,
    Observation,
    OpenEnvError,
    ServerError,
    State,
    ValidationFailedError,
    errors,
)
from openenv_core.protocol.jsonio import dumps, reader
from openenv_core.protocol.replies import server_error
from openenv_core.protocol.requests import Close, ReadState, RequestDecoder, Reset, encode_request
from openenv_core.tools import (
    RESERVED_TOOL_NAMES,
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)

OBSERVATION = {"done": False, "reward": None, "metadata": {}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
LATE = {"error_type": "timeout", "message": "30 s"}

# Each model with the least that it takes, and what this comes out as beside that.
WHOLE: list[tuple[type[BaseModel], dict[str, Any], dict[str, Any]]] = [
    (Action, {}, {"metadata": {}}),
    (Observation, {}, OBSERVATION),
    (State, {"anything": [1]}, {"episode_id": None, "step_count": 0}),
    (ConcurrencyConfig, {}, {"max_concurrent_envs": 1, "session_timeout": None}),
    (ConcurrencyConfig, {"session_timeout": 0.5}, {"max_concurrent_envs": 1}),
    (
        EnvironmentMetadata,
        {"name": "n", "description": "d"},
        dict.fromkeys(("readme_content", "version", "author", "documentation_url")),
    ),
    (ListToolsAction, {}, {"metadata": {}, "type": "list_tools"}),
    (CallToolAction, {"tool_name": "add"}, {"metadata": {}, "type": "call_tool", "arguments": {}}),
    (ListToolsObservation, {"tools": [TOOL]}, OBSERVATION),
    (CallToolObservation, {"tool_name": "add"}, {**OBSERVATION, "result": None, "error": None}),
    (CallToolObservation, {"tool_name": "add", "error": LATE}, {**OBSERVATION, "result": None}),
]

REFUSED: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (Action, {"extra": 1}),
    (Observation, {"extra": 1}),
    (Observation, {"reward": "much"}),
    (State, {"step_count": -1}),
    (EnvironmentMetadata, {"name": "n"}),
    (ConcurrencyConfig, {"max_concurrent_envs": 0}),
    (ConcurrencyConfig, {"session_timeout": 0}),
    (ConcurrencyConfig, {"extra": 1}),
    (ListToolsAction, {"type": "call_tool"}),
    (ListToolsAction, {"tool_name": "add"}),
    (CallToolAction, {}),
    (CallToolAction, {"tool_name": "add", "args": {}}),
    (Tool, {"name": "add", "description": "Adds.", "inputSchema": {}}),
    (ToolError, {"error_type": "unknown", "message": ""}),
]


def test_wire_models_round_trip_and_refuse_invalid_fields() -> None:
    for model, given_, rest in WHOLE:
        read = model.model_validate(given_)
        assert read.model_dump(mode="json") == given_ | rest
        assert model.model_validate_json(read.model_dump_json()) == read
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
    decoder = RequestDecoder(Action)
    assert isinstance(decoder.frame(encode_request("state").decode()), ReadState)
    assert isinstance(decoder.frame(encode_request("close").decode()), Close)
    assert decoder.frame(encode_request("reset").decode()) == Reset({})
    options = {"seed": 1, "sab": True}
    assert decoder.frame(encode_request("reset", options).decode()) == Reset(options)
    assert decoder.frame('{"type":"reset","data":null}') == Reset({})


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


def test_any_error_payload_becomes_a_typed_error() -> None:
    listed: list[object] = [{"loc": ["a", 0], "msg": "m"}]
    for errors_field in (None, "text", 3, [1], listed, [{"loc": 5}], [{"loc": None}]):
        error = server_error(
            {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors_field}
        )
        assert isinstance(error, ValidationFailedError)
        assert "Invalid message" in str(error)
    error = server_error({"code": "NEW"})
    assert type(error) is ServerError
    assert error.code == "NEW"
