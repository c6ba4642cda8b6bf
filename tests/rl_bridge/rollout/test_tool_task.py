"""What a task of tools says where nobody says otherwise."""

from collections.abc import Mapping
from typing import Any

import pytest
from tool_fixtures import Desk, DeskTask, Direct, Told, task_of

from openenv_core import Observation, StepResult
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from rl_bridge.errors import EpisodeLost, RolloutError
from rl_bridge.rollout import ToolTask
from rl_bridge.rollout.world import World
from rl_bridge.tokens.tool_calls import ToolCall


@pytest.fixture
def task() -> ToolTask:
    made = task_of(DeskTask)
    assert isinstance(made, ToolTask)
    return made


def gave(result: Any) -> CallToolObservation:
    return CallToolObservation(tool_name="f", result=result)


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("as it is\n", "as it is\n"),
        ("", ""),
        (None, "null"),
        (3, "3"),
        ({"name": "é", "of": [1, 2.5, None]}, '{"name": "é", "of": [1, 2.5, null]}'),
        ([], "[]"),
        (["a", "b"], '["a", "b"]'),
        (
            [
                {"type": "text", "text": "before"},
                {"type": "image", "data": "AAAA" * 1000, "mimeType": "image/png"},
                {"type": "text", "text": "after"},
            ],
            "before\n[image]\nafter",
        ),
        # Data that only looks like it.
        ([{"type": "cat"}], '[{"type": "cat"}]'),
        ([{"type": "text"}], '[{"type": "text"}]'),
        ([{"type": "text", "data": "x"}], '[{"type": "text", "data": "x"}]'),
        ([{"text": "x"}], '[{"text": "x"}]'),
        ([{"type": ["text"], "text": "x"}], '[{"type": ["text"], "text": "x"}]'),
        ([{"type": "text", "text": 3}], "3"),
    ],
)
def test_what_a_call_gave_is_told_as_text(task: ToolTask, result: Any, shown: str) -> None:
    assert task.result(gave(result)) == shown


def test_why_a_call_failed_is_told(task: ToolTask) -> None:
    error = ToolError(error_type=ToolErrorType.INVALID_ARGS, message="expected a number")
    assert task.result(CallToolObservation(tool_name="f", error=error)) == "error: expected a number"


def test_a_call_is_an_action_as_it_is_written(task: ToolTask) -> None:
    action = task.action(ToolCall("f", {"a": [1], "b": None}))
    assert action == CallToolAction(tool_name="f", arguments={"a": [1], "b": None})
    assert task.parse("42") is None


def test_an_observation_that_is_none_of_tools_is_for_the_task_to_tell(task: ToolTask) -> None:
    assert task.messages(Told(task="do it")) == [{"role": "user", "content": "do it"}]
    with pytest.raises(TypeError, match=r"override DeskTask.messages"):
        task.messages(Observation())
    with pytest.raises(TypeError, match=r"override DeskTask.result"):
        task.result(Observation())


async def test_tools_are_those_that_the_environment_lists(task: ToolTask) -> None:
    desk = Desk()
    functions = await task.functions(Direct(desk), desk.reset(seed=1))
    assert [one["function"]["name"] for one in functions] == ["add", "echo", "fail", "hang", "finish"]
    assert functions[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert desk.state.step_count == 0  # to ask is no step


async def test_tools_that_cannot_be_listed_are_nobodys_play(task: ToolTask) -> None:
    class Broken:
        async def step(self, action: Any, /) -> StepResult[Any]:
            gone = {"infrastructure_error": "the tool server is gone"}
            return StepResult(ListToolsObservation(tools=[], done=True, metadata=gone), None, True, gone)

    broken: Any = Broken()
    with pytest.raises(EpisodeLost, match="the tool server is gone"):
        await task.functions(broken, Told(task="do it"))


async def test_a_world_without_tools_is_nobodys_play_either(task: ToolTask) -> None:
    """Released environments list none where they could not list them."""
    for metadata, why in (
        ({"error": "the MCP server is gone"}, "the MCP server is gone"),
        ({}, "not say why"),
    ):
        with pytest.raises(EpisodeLost, match=f"got none: .*{why}"):
            await task.functions(answering(ListToolsObservation(tools=[], metadata=metadata)), Observation())
    with pytest.raises(TypeError, match=r"a list of tools, got Told; override DeskTask\.functions"):
        await task.functions(answering(Told(task="again")), Told(task="do it"))
    with pytest.raises(RolloutError, match=r"as rollout\.task is not set, got one that lists none"):
        await World(task.config, task.folder).functions(answering(Told(task="again")), Told(task="do it"))


def answering(observation: Observation) -> Any:
    class Answering:
        async def step(self, action: Any, /) -> StepResult[Any]:
            return StepResult(observation, None, False, observation.metadata)

    return Answering()


async def test_a_world_that_begins_with_its_tools_is_not_asked_again(task: ToolTask) -> None:
    schema: Mapping[str, Any] = {"type": "object", "properties": {}}
    first = ListToolsObservation(tools=[Tool(name="f", description="d", input_schema=dict(schema))])
    asked: Any = None
    assert await task.functions(asked, first) == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    ]
