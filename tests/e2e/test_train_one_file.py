"""`ropewalk train --env`: a published model is trained on an environment in one file, with the default task."""

from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.conftest import Watched, rows
from published import published_model

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

GAME = '''\
from openenv_core import Action, Environment, Observation


class Guess(Action):
    number: int


class Face(Observation):
    hint: str = ""


class Dice(Environment[Guess, Face]):
    """Guess the die."""

    def reset(self) -> Face:
        self.secret = self.rng.randint(1, 6)
        return Face(hint="{hint}")

    def step(self, action: Guess) -> Face:
        won = action.number == self.secret
        return Face(reward=float(won), terminated=True)
'''


def train(
    ropewalk: Callable[..., Watched], folder: Path, hint: str, *overrides: str
) -> list[dict[str, float]]:
    file = folder / "dice.py"
    file.write_text(GAME.replace('"{hint}"', hint))
    arguments = (
        "--name",
        "run",
        f"output_dir={folder}",
        f"model.path={published_model()}",
        "evaluation.episodes=16",
    )
    run = ropewalk("train", "--env", str(file), *arguments, "evaluation.interval=0", *overrides)
    assert run.wait(800) == 0, run.output()[-3000:]
    return rows(folder / "run")


def test_three_iterations_of_a_game_that_tells_nothing(
    ropewalk: Callable[..., Watched], tmp_path: Path
) -> None:
    found = train(
        ropewalk,
        tmp_path,
        '"1 to 6"',
        "trainer.iterations=3",
        "rollout.batch_size=16",
        "rollout.max_new_tokens=4",
    )
    assert len(found) == 3
    assert found[0]["rollout/ending/completed"] > 0.0


@pytest.mark.soak
def test_reward_rises_where_the_hint_has_the_number(ropewalk: Callable[..., Watched], tmp_path: Path) -> None:
    overrides = ("trainer.iterations=6", "trainer.learning_rate=1.0e-5", "trainer.warmup_updates=0")
    found = train(
        ropewalk, tmp_path, 'f"the number is {self.secret}"', "rollout.max_new_tokens=4", *overrides
    )
    rewards = [row["reward/mean"] for row in found]
    assert sum(rewards[-2:]) > sum(rewards[:2])
