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
