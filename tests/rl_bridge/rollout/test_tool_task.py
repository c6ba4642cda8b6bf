"""Defaults of tool tasks, and the task of a run that names none."""

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from tool_fixtures import (
    END,
    START,
    TOLD,
    DeskStart,
    DeskTask,
    LoggingEngine,
    PieceTokenizer,
    calling,
    chat_tokenizer,
    task_of,
)
from worker_fixtures import Play, playing, trajectories

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
def test_tool_result_is_rendered_as_text(task: ToolTask, result: Any, shown: str) -> None:
    assert task.result(gave(result)) == shown


def test_call_is_an_action_as_written_and_its_error_is_told(task: ToolTask) -> None:
    error = ToolError(error_type=ToolErrorType.INVALID_ARGS, message="expected a number")
    assert task.result(CallToolObservation(tool_name="f", error=error)) == "error: expected a number"
    action = task.action(ToolCall("f", {"a": [1], "b": None}))
    assert action == CallToolAction(tool_name="f", arguments={"a": [1], "b": None})
    assert task.parse("42") is None


async def test_tools_that_cannot_be_listed_lose_the_episode(task: ToolTask) -> None:
    """Released environments list none where they could not list them."""
    for metadata, why in (
        ({"error": "the MCP server is gone"}, "the MCP server is gone"),
        ({}, "not say why"),
    ):
        with pytest.raises(EpisodeLostError, match=f"got none: .*{why}"):
            await task.functions(answering(ListToolsObservation(tools=[], metadata=metadata)), Observation())
    gone = {"infrastructure_error": "the tool server is gone"}
    lost = ListToolsObservation(tools=[], done=True, metadata=gone)
    with pytest.raises(EpisodeLostError, match="the tool server is gone"):
        await task.functions(answering(lost), DeskStart(task="do it"))
    with pytest.raises(
        RolloutError, match=r"a list of tools, got DeskStart \(.*\); override DeskTask\.functions$"
    ):
        await task.functions(answering(DeskStart(task="again")), DeskStart(task="do it"))
    with pytest.raises(
        RolloutError, match=r"override ToolWorldTask\.functions in .*by rollout\.task, which is not"
    ):
        await ToolWorldTask(task.config, task.folder).functions(
            answering(DeskStart(task="again")), DeskStart(task="do it")
        )


def answering(observation: Observation) -> Any:
    class Answering:
        async def step(self, action: Any, /) -> StepResult[Any]:
            return StepResult(observation, None, observation.done, observation.metadata)

    return Answering()


ADD, FINISH = calling("add", a=1, b=2), calling("finish")


def scripted(prompt: str) -> str:
    return ADD if prompt.count(f"{START}assistant\n") == 1 else FINISH


def world(monkeypatch: pytest.MonkeyPatch, url: str) -> AbstractAsyncContextManager[Play]:
    pieces = PieceTokenizer()
    return playing(
        [url],
        ToolWorldTask,
        scripted,
        tokenizer=chat_tokenizer(monkeypatch, pieces),
        engine=LoggingEngine(pieces, scripted),
        max_new_tokens=400,
        max_length=8000,
    )


async def test_world_of_tools_is_played_as_it_describes_itself(
    desk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(monkeypatch, desk) as play:
        (episode,) = trajectories(await play([7]))
        first, second = play.engine.asked
    assert (episode.ending, episode.tool_calls, episode.reward) == (Ending.COMPLETED, 2, 1.25)
    assert f"{START}user\n{TOLD}task 7 and so on" in first
    assert "add echo fail hang finish" in first
    assert second.startswith(f"{first}{ADD}{END}")


async def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = task_of(ToolWorldTask)
    task.folder = tmp_path
    endings = [Ending.COMPLETED, Ending.TRUNCATED_TURNS, Ending.COMPLETED]
    result = EvaluationResult(rewards=[1.0, 0.0, 0.5], endings=endings, dropped=2, train_seconds=7.0)
    policy = object()
    await task.report(policy, result)  # type: ignore[arg-type]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["endings"] == {"completed": 2, "truncated_turns": 1}
    assert (report["episodes"], report["mean_reward"], report["dropped"]) == (3, 0.5, 2)
    assert capsys.readouterr().out == "3 held-out episodes: mean reward 0.5\n"
    await task.report(policy, EvaluationResult(rewards=[], endings=[], dropped=0, train_seconds=1.0))  # type: ignore[arg-type]
    assert json.loads((tmp_path / "report.json").read_text())["mean_reward"] is None
