"""A hidden number from 1 to 100, in seven guesses."""

import random
from uuid import uuid4

from openenv_core import Environment, EpisodeOverError
from openenv_core.errors import EnvironmentFailureError

from ..models import Guess, GuessState, Hint

GUESSES = 7


class GuessEnvironment(Environment[Guess, Hint, GuessState]):
    """A hidden number; each guess is told to be too low, too high, or right."""

    DETERMINISTIC = True
    FORKABLE = True
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._number = 0
        self._guesses: list[int] = []
        self._state = GuessState()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Hint:
        """Hide a number."""
        self._random = random.Random(seed)
        self._number = self._random.randint(1, 100)
        self._guesses = []
        self._state = GuessState(episode_id=episode_id or str(uuid4()))
        return self._hint("start", None)

    def step(self, action: Guess) -> Hint:
        """Compare a guess with the hidden number."""
        if self._state.episode_id is None:
            raise EnvironmentFailureError(
                "expected reset() before the first step(), got step(); call reset() first"
            )
        if self._state.done:
            raise EpisodeOverError
        self._guesses.append(action.number)
        self._state.step_count += 1
        right = action.number == self._number
        self._state.done = right or len(self._guesses) >= GUESSES
        word = "right" if right else "low" if action.number < self._number else "high"
        return self._hint(word, 1.0 if right else 0.0)

    @property
    def state(self) -> GuessState:
        """A copy of where the episode stands."""
        return self._state.model_copy()

    def close(self) -> None:
        """Give nothing back: there is nothing."""

    def _hint(self, word: str, reward: float | None) -> Hint:
        return Hint(
            done=self._state.done,
            reward=reward,
            episode=self._state.episode_id,
            hint=word,
            left=GUESSES - len(self._guesses),
            guesses=list(self._guesses),
            parity=self._random.randint(0, 1),
        )
