"""What type checkers require of an author's and a caller's code."""

import re
import sys
from pathlib import Path

import pytest
from module_run import finished

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CODE = """
from collections.abc import Awaitable

from openenv_core import Action, Environment, Observation, State, StepResult


class Roll(Action):
    sides: int = 6


class Face(Observation):
    face: int = 0


class Dice(Environment[Roll, Face, State]):
    def reset(self, seed: int | None = None, episode_id: str | None = None, sides: int = 6) -> Face:
        return Face(done=True, truncated=True, infrastructure_error="no dice", unscored=None)

    async def step(self, roll: Roll, timeout_s: float | None = None) -> Face:
        return Face(truncated="yes")  # arg-type

    @property
    def state(self) -> State:
        return State()


class Awaited(Environment[Roll, Face, State]):
    async def reset_async(self, seed: int | None = None) -> Face:
        return Face()

    async def step_async(self, action: Roll) -> Face:
        return Face()

    @property
    def state(self) -> State:
        return State()


class Kept(Environment[Roll, Face]):
    def reset(self, *, sides: int = 6) -> Face:
        self.face = self.rng.randint(1, sides)
        return Face(face=self.state.seed or self.state.step_count)

    def step(self, action: int) -> Face:  # override
        return Face(face=self.state.sides)  # attr-defined


class OfAnotherType(Environment[Roll, Face, State]):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> State:  # override
        return State()

    def step(self, action: Roll, sides: int) -> Face:  # override
        return Face()


def play(env: Environment[Roll, Face, State]) -> Face | Awaitable[Face]:
    env.step(Face())  # arg-type
    return env.step(Roll())


def heard(result: StepResult[Face]) -> tuple[bool, bool, str | None, str | None, int]:
    return result.terminated, result.truncated, result.infrastructure_error, result.unscored, result.observation.face


play(Dice())
play(Awaited())
"""


def test_wrong_signatures_are_type_errors_and_outcome_fields_are_typed(tmp_path: Path) -> None:
    file = tmp_path / "dice.py"
    file.write_text(CODE)
    options = ["--strict", "--cache-dir", str(tmp_path), "--no-error-summary", "--config-file", ""]
    done = finished(sys.executable, "-m", "mypy", *options, str(file), cwd=ROOT, timeout_s=240)
    errors = re.findall(r"dice\.py:(\d+): error: .*\[([a-z-]+)\]", done.stdout)
    wanted = [
        (str(line), text.rpartition("# ")[2])
        for line, text in enumerate(CODE.splitlines(), 1)
        if "# " in text
    ]
    assert errors == wanted, done.stdout + done.stderr
