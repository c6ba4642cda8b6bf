"""The game: a number to guess."""

import random
import secrets
from uuid import uuid4

from openenv_core import Environment
from openenv_core.errors import EpisodeOverError

from ..models import (
    GUESSES,
    HIGHEST,
    LOWEST,
    Hint,
    PlaceHolderAction,
    PlaceHolderObservation,
    PlaceHolderState,
)

# Drawn seeds must be exact in JSON readers that parse integers as doubles.
_DRAWN_SEED_BITS = 53


class PlaceHolderEnvironment(Environment[PlaceHolderAction, PlaceHolderObservation, PlaceHolderState]):
    """Find a number from 1 to 10 in 4 guesses; each is answered with "higher" or "lower".

    The seed determines the number, so the same seed and guesses give the same episode.
    """

    # The methods never wait and take microseconds, so a server may run them on its event loop.
    BLOCKING = False
    # The seed and the actions determine the episode.
    DETERMINISTIC = True
    # Instances share nothing, so one process can hold many sessions.
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._number = self._lowest = self._highest = 0
        self._state = PlaceHolderState()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> PlaceHolderObservation:
        """Draw a number.

        Args:
            seed: Determines the number; None draws a seed, which `state` then has.
            episode_id: The caller's name for the episode; None draws a UUID.
        """
        if seed is None:
            seed = secrets.randbits(_DRAWN_SEED_BITS)
        self._number = random.Random(seed).randint(LOWEST, HIGHEST)
        self._lowest, self._highest = LOWEST, HIGHEST
        self._state = PlaceHolderState(
            episode_id=str(uuid4()) if episode_id is None else episode_id, seed=seed
        )
        return self._observe(None)

    def step(self, action: PlaceHolderAction) -> PlaceHolderObservation:
        """Answer a guess.

        Raises:
            EpisodeOverError: No episode is in progress.
        """
        state = self._state
        if state.seed is None:
            raise EpisodeOverError("expected reset() before the first step(), got step(); call reset() first")
        if state.done:
            raise EpisodeOverError
        state.step_count += 1
        guess = action.guess
        hint: Hint = "found"
        if guess < self._number:
            hint = "higher"
            self._lowest = max(self._lowest, guess + 1)
        elif guess > self._number:
            hint = "lower"
            self._highest = min(self._highest, guess - 1)
        else:
            self._lowest = self._highest = guess
        state.done = hint == "found" or state.step_count == GUESSES
        return self._observe(hint)

    @property
    def state(self) -> PlaceHolderState:
        """The state of the episode: a copy, so that callers cannot change the game."""
        return self._state.model_copy()

    def _observe(self, hint: Hint | None) -> PlaceHolderObservation:
        left = GUESSES - self._state.step_count
        if hint == "found":
            text = f"Found: it is {self._number}."
        elif self._state.done:
            text = f"Not found: it was {self._number}."
        else:
            hint_text = "" if hint is None else f"It is {hint}. "
            text = f"{hint_text}Guess a number from {self._lowest} to {self._highest}. Guesses left: {left}."
        return PlaceHolderObservation(
            done=self._state.done,
            reward=None if hint is None else float(hint == "found"),
            hint=hint,
            lowest=self._lowest,
            highest=self._highest,
            guesses_left=left,
            text=text,
        )
