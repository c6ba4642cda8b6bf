"""The game: a number to guess."""

from openenv_core import Environment

from ..models import (
    GUESSES,
    HIGHEST,
    LOWEST,
    Hint,
    PlaceHolderAction,
    PlaceHolderObservation,
)


class PlaceHolderEnvironment(Environment[PlaceHolderAction, PlaceHolderObservation]):
    """Find a number from 1 to 10 in 4 guesses; each is answered with "higher" or "lower".

    The seed determines the number, so the same seed and guesses give the same episode.
    """

    # The methods never wait and take microseconds, so a server may run them on its event loop.
    BLOCKING = False
    # The seed and the actions determine the episode.
    DETERMINISTIC = True

    def reset(self) -> PlaceHolderObservation:
        """Draw a number."""
        self._number = self.rng.randint(LOWEST, HIGHEST)
        self._lowest, self._highest = LOWEST, HIGHEST
        return self._observe(None)

    def step(self, action: PlaceHolderAction) -> PlaceHolderObservation:
        """Answer a guess."""
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
        return self._observe(hint)

    def _observe(self, hint: Hint | None) -> PlaceHolderObservation:
        left = GUESSES - self.state.step_count
        over = hint == "found" or not left
        if hint == "found":
            text = f"Found: it is {self._number}."
        elif over:
            text = f"Not found: it was {self._number}."
        else:
            hint_text = "" if hint is None else f"It is {hint}. "
            text = f"{hint_text}Guess a number from {self._lowest} to {self._highest}. Guesses left: {left}."
        return PlaceHolderObservation(
            terminated=over,
            reward=None if hint is None else float(hint == "found"),
            hint=hint,
            lowest=self._lowest,
            highest=self._highest,
            guesses_left=left,
            text=text,
        )
