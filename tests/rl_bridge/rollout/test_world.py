"""The task of a run that names none: a world of tools is played, and what is none is told apart."""

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from tool_fixtures import (
    END,
    START,
    TOLD,
    LoggingEngine,
    PieceTokenizer,
    Told,
    calling,
    chat_tokenizer,
    task_of,
)
from worker_fixtures import HERE, Play, playing, trajectories

from openenv_core import LocalProcessProvider
from openenv_core.tools import CallToolObservation
from rl_bridge.errors import RolloutError
from rl_bridge.rollout import EvaluationResult
from rl_bridge.rollout.world import World
from rl_bridge.types import Ending

ADD, FINISH = calling("add", a=1, b=2), calling("finish")
SUPPORT = str(Path(__file__).parents[2] / "support")


def scripted(prompt: str) -> str:
    return ADD if prompt.count(f"{START}assistant\n") == 1 else FINISH


def world(monkeypatch: pytest.MonkeyPatch, url: str) -> AbstractAsyncContextManager[Play]:
    pieces = PieceTokenizer()
    return playing(
        [url],
        World,
        scripted,
        tokenizer=chat_tokenizer(monkeypatch, pieces),
        engine=LoggingEngine(pieces, scripted),
        max_new_tokens=400,
        max_length=8000,
    )


async def test_a_world_of_tools_is_played_as_it_describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalProcessProvider("tool_fixtures:desk_app", cwd=HERE) as provider:
        async with world(monkeypatch, str(provider.url)) as play:
            (episode,) = trajectories(await play([7]))
            first, second = play.engine.asked
    assert (episode.ending, episode.tool_calls, episode.reward) == (Ending.COMPLETED, 2, 1.25)
    assert f"{START}user\n{TOLD}task 7 and so on" in first
    assert "add echo fail hang finish" in first
    assert second.startswith(f"{first}{ADD}{END}")


async def test_an_environment_that_is_none_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalProcessProvider("counter:app", cwd=SUPPORT) as provider:
        async with world(monkeypatch, str(provider.url)) as play:
            with pytest.raises(RolloutError, match=r"got total, extra; write a subclass of .*rollout\.task"):
                await play([7])
            monkeypatch.setattr(
                World, "messages", lambda self, observation: [{"role": "user", "content": "?"}]
            )
            with pytest.raises(RolloutError, match=r"lists none .*; write a subclass of .*rollout\.task"):
                await play([7])


def test_what_a_call_gave_has_to_look_like_it() -> None:
    world = task_of(World)
    assert isinstance(world, World)
    assert world.result(CallToolObservation(tool_name="add", result="3")) == "3"
    with pytest.raises(
        RolloutError, match=r"got an observation of task; write a subclass of .*rollout\.task"
    ):
        world.result(Told(task="again"))


async def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = task_of(World)
    task.folder = tmp_path
    endings = [Ending.COMPLETED, Ending.TRUNCATED_TURNS, Ending.COMPLETED]
    result = EvaluationResult(rewards=[1.0, 0.0, 0.5], endings=endings, dropped=2, train_seconds=7.0)
    policy = object()
    await task.report(policy, result)  # type: ignore[arg-type]
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["endings"] == {"completed": 2, "truncated_turns": 1}
    assert (told["episodes"], told["mean_reward"], told["dropped"]) == (3, 0.5, 2)
    assert capsys.readouterr().out == "3 held-out episodes: mean reward 0.5\n"
    await task.report(policy, EvaluationResult(rewards=[], endings=[], dropped=0, train_seconds=1.0))  # type: ignore[arg-type]
    assert json.loads((tmp_path / "report.json").read_text())["mean_reward"] is None
