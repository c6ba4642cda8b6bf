"""Defaults of tool tasks, and the task of a run that names none."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tool_fixtures import DeskStart, DeskTask, task_of

from openenv_core import Observation, StepResult
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    ListToolsObservation,
    ToolError,
    ToolErrorType,
)
from rl_bridge.errors import EpisodeLostError, RolloutError
from rl_bridge.rollout import EvaluationResult, ToolTask
from rl_bridge.rollout.tool_task import ToolWorldTask
from rl_bridge.tokens.tool_calls import ToolCall
from rl_bridge.types import Ending

TASK = task_of(DeskTask)


def no_tools(**metadata: str) -> ListToolsObservation:
    return ListToolsObservation(tools=[], metadata=metadata)


def gave(result: Any) -> CallToolObservation:
    return CallToolObservation(tool_name="f", result=result)


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("as it is\n", "as it is\n"),
        ({"name": "é", "of": [1, 2.5, None]}, '{"name": "é", "of": [1, 2.5, null]}'),
        (
            [
                {"type": "text", "text": "before"},
                {"type": "image", "data": "AAAA" * 1000, "mimeType": "image/png"},
                {"type": "text", "text": "after"},
            ],
            "before\n[image]\nafter",
        ),
        ([{"type": "cat"}], '[{"type": "cat"}]'),
    ],
)
def test_tool_result_is_rendered_as_text(result: Any, shown: str) -> None:
    assert TASK.result(gave(result)) == shown


def test_call_is_an_action_as_written_and_its_error_is_told() -> None:
    error = ToolError(error_type=ToolErrorType.INVALID_ARGS, message="expected a number")
    assert TASK.result(CallToolObservation(tool_name="f", error=error)) == "error: expected a number"
    action = TASK.action(ToolCall("f", {"a": [1], "b": None}))
    assert action == CallToolAction(tool_name="f", arguments={"a": [1], "b": None})
    assert TASK.parse("42") is None


START = DeskStart(task="do it")


@pytest.mark.parametrize(
    ("task", "answer", "error", "message"),
    [
        # Released environments list none where they could not list them.
        (
            TASK,
            no_tools(error="the MCP server is gone"),
            EpisodeLostError,
            "got none: the MCP server is gone",
        ),
        (TASK, no_tools(), EpisodeLostError, "got none: it does not say why"),
        (TASK, no_tools(infrastructure_error="no disk"), EpisodeLostError, "no disk"),
        (TASK, START, RolloutError, r"a list of tools, got DeskStart \(.*\); override DeskTask\.functions$"),
        (
            task_of(ToolWorldTask),
            START,
            RolloutError,
            r"override ToolWorldTask\.functions in .*by rollout\.task",
        ),
    ],
)
async def test_tools_that_cannot_be_listed_lose_the_episode(
    task: ToolTask, answer: Observation, error: type[Exception], message: str
) -> None:
    async def step(action: Any, /) -> StepResult[Any]:
        return StepResult(answer, None, answer.done, answer.metadata)

    session: Any = SimpleNamespace(step=step)
    with pytest.raises(error, match=message):
        await task.functions(session, START)


async def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, policy = task_of(ToolWorldTask), cast(Any, None)
    task.folder = tmp_path
    endings = [Ending.COMPLETED, Ending.TRUNCATED_TURNS, Ending.COMPLETED]
    result = EvaluationResult(rewards=[1.0, 0.0, 0.5], endings=endings, dropped=2, train_seconds=7.0)
    await task.report(policy, result)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["endings"] == {"completed": 2, "truncated_turns": 1}
    assert (report["episodes"], report["mean_reward"], report["dropped"]) == (3, 0.5, 2)
    assert capsys.readouterr().out == "3 held-out episodes: mean reward 0.5\n"
    await task.report(policy, replace(result, rewards=[], endings=[]))
    assert json.loads((tmp_path / "report.json").read_text())["mean_reward"] is None
