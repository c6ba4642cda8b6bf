"""`ropewalk eval --agent`: agents whose model is behind a server of chat completions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, chat_server
from serving import served
from tool_fixtures import desk_app

from openenv_core.cli.eval import COMMAND
from openenv_core.cli.main import run


@pytest.fixture(scope="module")
def desk_url() -> Iterator[str]:
    with served(desk_app) as address:
        yield f"http://{address}"


@pytest.fixture
def model() -> Iterator[ChatServer]:
    with chat_server() as server:
        yield server


def evaluate(model: ChatServer, desk_url: str, agent: str, out: Path, *arguments: str) -> int:
    policy = f"http://127.0.0.1:{model.port}/v1"
    return run(
        COMMAND,
        [desk_url, "--agent", agent, "--policy", policy, "--episodes", "1", "--out", str(out), *arguments],
    )


def record(out: Path) -> Any:
    (line,) = (out / "rollouts" / "000001.jsonl").read_text().splitlines()
    return json.loads(line)


def call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"content": "I call.", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def test_agent_plays_with_a_model_on_a_server(desk_url: str, model: ChatServer, tmp_path: Path) -> None:
    model.answers += [call("add", '{"a": 1, "b": 2}'), call("finish", "{}")]
    arguments = ("--temperature", "0.5", "--system", "Be brief.")
    assert evaluate(model, desk_url, "agent_fixtures:call_in_a_loop", tmp_path, *arguments) == 0
    played = record(tmp_path)
    assert (played["ending"], played["reward"], played["tool_calls"]) == ("completed", 1.25, 2)
    assert [(turn["parent"], turn["fresh"]) for turn in played["turns"]] == [(None, True), (0, False)]
    assert "[system] Be brief." in played["turns"][0]["context"]
    assert "1 and 2 are 3" in played["turns"][1]["context"]
    assert "<tool_call>" in played["turns"][1]["answer"]
    first, second = model.requests
    assert first["temperature"] == second["temperature"] == 0.5
    assert second["seed"] == first["seed"] + 1
    *_, call_message, result = second["messages"]
    assert call_message["tool_calls"][0]["id"] == result["tool_call_id"]
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert report["agent"] == "agent_fixtures:call_in_a_loop"


def test_branches_and_cut_calls_are_recorded(desk_url: str, model: ChatServer, tmp_path: Path) -> None:
    model.answers += ["One.", "Two.", call("add", "{"), "Four."]
    assert evaluate(model, desk_url, "agent_fixtures:ask_aside", tmp_path) == 0
    turns = record(tmp_path)["turns"]
    assert [(turn["parent"], turn["fresh"]) for turn in turns] == [
        (None, True),
        (None, True),
        (0, True),
        (2, False),
    ]
    assert turns[3]["context"] == "[user] and on"


@pytest.mark.parametrize(
    ("answers", "arguments", "ending"),
    [
        ([call("add", '{"a": 1, "b": 2}')], ("--max-turns", "2"), "truncated_turns"),
        ([call("add", '{"a": 1, "b": 2}'), 400], (), "truncated_length"),
        (["I give up."], (), "completed"),
    ],
)
def test_limits_end_an_episode_with_what_it_has_earned(
    desk_url: str,
    model: ChatServer,
    tmp_path: Path,
    answers: list[Any],
    arguments: tuple[str, ...],
    ending: str,
) -> None:
    model.answers += answers
    assert evaluate(model, desk_url, "agent_fixtures:call_in_a_loop", tmp_path, *arguments) == 0
    played = record(tmp_path)
    earned = 0.25 * played["tool_calls"]
    assert (played["ending"], played["reward"]) == (ending, earned)


@pytest.mark.parametrize(
    ("agent", "answer", "message"),
    [
        ("agent_fixtures:break_down", "Well.", "the agent is wrong"),
        ("agent_fixtures:call_in_a_loop", 400, "refuses the first request"),
        ("nobody", "Well.", "expected --agent as one of claude-code, codex"),
        ("agent_fixtures:nothing", "Well.", "has no 'nothing'"),
    ],
)
def test_what_is_broken_is_said(
    desk_url: str,
    model: ChatServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    agent: str,
    answer: Any,
    message: str,
) -> None:
    model.answers.append(answer)
    assert evaluate(model, desk_url, agent, tmp_path) in (1, 2)
    assert message in capsys.readouterr().err


def test_an_agent_needs_a_model_on_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(COMMAND, ["blackjack", "--agent", "codex", "--policy", "random"]) == 2
    assert "expected --agent with a model's server" in capsys.readouterr().err
