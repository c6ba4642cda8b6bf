"""An environment in one file, through the commands that take it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

DICE: Final = '''\
# dice.py
from openenv_core import Action, Environment, Observation

class Guess(Action):
    number: int

class Face(Observation):
    hint: str = ""

class Dice(Environment[Guess, Face]):
    """Guess the die."""

    def reset(self) -> Face:
        self.secret = self.rng.randint(1, 6)
        return Face(hint="1 to 6")

    def step(self, action: Guess) -> Face:
        won = action.number == self.secret
        return Face(hint=f"it was {self.secret}", reward=float(won), terminated=True)
'''

PLAYING: Final = """
from dice import Face, Guess
from openenv_core import ExecutionError, make

with make("dice.py") as env:
    assert env.reset(seed=1).observation == Face(hint="1 to 6")
    assert env.state().seed == 1
    result = env.step(Guess(number=2))
    assert (result.reward, result.done, result.terminated) == (1.0, True, True)
    assert env.state().step_count == 1
    for call in (lambda: env.step(Guess(number=2)), lambda: env.reset(sides=20)):
        try:
            call()
        except ExecutionError as error:
            print(error)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dice.py").write_text(DICE)
    return tmp_path


def run(folder: Path, *command: str, status: int = 0, timeout_s: float = 120) -> str:
    """Run a program in the folder, and return its output."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_mypy_takes_the_file_strictly(folder: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(folder), "--config-file", ""]
    done = subprocess.run(
        [*command, str(folder / "dice.py")], cwd=root, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout


def test_make_has_the_models_of_the_class(folder: Path) -> None:
    (folder / "playing.py").write_text(PLAYING)
    said = run(folder, sys.executable, "playing.py").splitlines()
    assert "reset() after the end of an episode" in said[0]
    assert "no reset options but seed and episode_id, got sides" in said[1]


def test_play_and_eval_take_the_file(folder: Path) -> None:
    lines = run(
        folder, "ropewalk", "play", "dice.py", "--seed", "1", "--action", '{"number": 2}', "--json"
    ).splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["reset", "step", "episode"]
    assert json.loads(lines[1])["reward"] == 1.0
    report = run(folder, "ropewalk", "eval", "dice.py", "--policy", "random", "--episodes", "30", "--json")
    figures = json.loads(report[report.index("{") : report.rindex("}") + 1])["environments"]["dice.py"]
    assert figures["episodes"] == 30


def test_of_several_environments_in_a_file_the_user_names_one(folder: Path) -> None:
    (folder / "games.py").write_text(
        DICE + "\n\nclass Coin(Dice):\n    pass\n\n\nclass Card(Dice):\n    pass\n"
    )
    said = run(folder, "ropewalk", "play", "games.py", "--random", "1", status=2)
    assert "there are 2 environments in games.py; name one: games.py:Coin or games.py:Card" in said
    assert "it was" in run(folder, "ropewalk", "play", "games.py:Coin", "--random", "1")


def test_mcp_offers_the_actions_as_tools(folder: Path) -> None:
    pytest.importorskip("mcp")

    def call(number: int, method: str, **params: object) -> str:
        return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params})

    client = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "t", "version": "1"},
    }
    lines = [
        call(1, "initialize", **client),
        json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}),
        call(2, "tools/list"),
        *(
            call(3 + at, "tools/call", name=name, arguments=arguments)
            for at, (name, arguments) in enumerate(
                [
                    ("guess", {"number": "six"}),
                    ("guess", {"number": 2}),
                    ("guess", {"number": 2}),
                    ("new_episode", {"sides": 20}),
                    ("new_episode", {"seed": 1}),
                ]
            )
        ),
    ]
    process = subprocess.Popen(
        ["ropewalk", "mcp", "dice.py", "--seed", "1"],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    answers = []
    with process:
        for line in lines:  # one after another: calls of a session may be answered in any order
            process.stdin.write(line + "\n")
            process.stdin.flush()
            if '"id"' in line:
                answers.append(json.loads(process.stdout.readline())["result"])
        process.stdin.close()
    listed = {tool["name"]: tool["inputSchema"]["properties"] for tool in answers[1]["tools"]}
    assert listed["guess"] == {"number": {"title": "Number", "type": "integer"}}
    assert set(listed["new_episode"]) == {"seed", "episode_id"}
    wrong, won, late, unknown, again = answers[2:]
    assert "valid integer" in wrong["content"][0]["text"]
    assert won["structuredContent"] == {"done": True, "reward": 1.0, "hint": "it was 2"}
    assert "end of an episode" in late["content"][0]["text"]
    assert "got sides" in unknown["content"][0]["text"]
    assert again["structuredContent"]["hint"] == "1 to 6"
