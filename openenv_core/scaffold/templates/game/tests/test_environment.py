"""The rules, and a whole episode through the client."""

from pathlib import Path

import pytest

from openenv_core import EpisodeOverError

from ..client import PlaceHolderEnv
from ..models import GUESSES, PlaceHolderAction
from ..server.environment import PlaceHolderEnvironment

PARENT = Path(__file__).parents[2]


def test_an_episode_ends_after_the_last_guess() -> None:
    """Wrong guesses use up the episode, and a step after its end is refused."""
    environment = PlaceHolderEnvironment()
    first = environment.reset(seed=1)
    wrong = 1 if environment.step(PlaceHolderAction(guess=1)).hint != "found" else 2
    environment.reset(seed=1)
    answers = [environment.step(PlaceHolderAction(guess=wrong)) for _ in range(GUESSES)]
    assert first.reward is None
    assert [answer.done for answer in answers] == [False] * (GUESSES - 1) + [True]
    assert {answer.reward for answer in answers} == {0.0}
    with pytest.raises(EpisodeOverError):
        environment.step(PlaceHolderAction(guess=wrong))


def test_halving_finds_every_number_through_the_client() -> None:
    """A client that plays well, on a server in another process."""
    with PlaceHolderEnv.from_process(cwd=str(PARENT)) as env:
        for seed in range(20):
            result = env.reset(seed=seed)
            while not result.done:
                observation = result.observation
                result = env.step(PlaceHolderAction(guess=(observation.lowest + observation.highest) // 2))
            assert (result.reward, result.observation.hint) == (1.0, "found")
