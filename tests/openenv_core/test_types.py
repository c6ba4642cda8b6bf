"""The models of the wire, each as section 1 of the protocol has it."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from openenv_core import Action, ConcurrencyConfig, EnvironmentMetadata, Observation, State
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

# Each model with the least that it takes, and all that this comes out as.
WHOLE: list[tuple[type[BaseModel], dict[str, Any], dict[str, Any]]] = [
    (Action, {}, {"metadata": {}}),
    (Observation, {}, OBSERVATION),
    (State, {}, {"episode_id": None, "step_count": 0}),
    (State, {"anything": [1]}, {"episode_id": None, "step_count": 0, "anything": [1]}),
    (ConcurrencyConfig, {}, {"max_concurrent_envs": 1, "session_timeout": None}),
    (ConcurrencyConfig, {"session_timeout": 0.5}, {"max_concurrent_envs": 1, "session_timeout": 0.5}),
    (
        EnvironmentMetadata,
        {"name": "n", "description": "d"},
        {
            "name": "n",
            "description": "d",
            "readme_content": None,
            "version": None,
            "author": None,
            "documentation_url": None,
        },
    ),
    (ListToolsAction, {}, {"metadata": {}, "type": "list_tools"}),
    (
        CallToolAction,
        {"tool_name": "add"},
        {"metadata": {}, "type": "call_tool", "tool_name": "add", "arguments": {}},
    ),
    (
        ListToolsObservation,
        {"tools": [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]},
        {
            **OBSERVATION,
            "tools": [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}],
        },
    ),
    (
        CallToolObservation,
        {"tool_name": "add"},
        {**OBSERVATION, "tool_name": "add", "result": None, "error": None},
    ),
    (
        CallToolObservation,
        {"tool_name": "add", "error": {"error_type": "timeout", "message": "30 s"}},
        {
            **OBSERVATION,
            "tool_name": "add",
            "result": None,
            "error": {"error_type": "timeout", "message": "30 s"},
        },
    ),
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


@pytest.mark.parametrize(("model", "given", "whole"), WHOLE, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_sent_is_read_back(
    model: type[BaseModel], given: dict[str, Any], whole: dict[str, Any]
) -> None:
    read = model.model_validate(given)
    assert read.model_dump(mode="json") == whole
    assert model.model_validate_json(read.model_dump_json()) == read


@pytest.mark.parametrize(("model", "given"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_the_wire_refuses(model: type[BaseModel], given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(given)


@pytest.mark.parametrize("reward", [True, 1, 0.5, None])
def test_a_reward_keeps_its_json_type(reward: Any) -> None:
    read = Observation.model_validate_json(Observation(reward=reward).model_dump_json())
    assert read.reward is reward or (type(read.reward), read.reward) == (type(reward), reward)


def test_the_ways_that_a_tool_fails() -> None:
    assert {kind.value for kind in ToolErrorType} == {
        "execution_error",
        "invalid_args",
        "transport_error",
        "tool_not_found",
        "timeout",
    }
    assert {"reset", "step", "state", "close"} == RESERVED_TOOL_NAMES
