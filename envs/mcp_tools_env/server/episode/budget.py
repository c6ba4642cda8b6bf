"""What an episode may cost: so many calls, so many seconds."""

import time
from typing import Literal


class Budget:
    """Counts from its making on.

    Args:
        calls: How many there are.
        time_s: How long the episode may take.

    Attributes:
        made: How many calls were made.
    """

    def __init__(self, calls: int, time_s: float) -> None:
        self._calls = calls
        self._time_s = time_s
        self._began = time.monotonic()
        self.made = 0

    @property
    def calls_left(self) -> int:
        """How many calls there are left."""
        return self._calls - self.made

    def elapsed_s(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self._began

    def time_left_s(self) -> float:
        """Return how many seconds there are left; 0 where none are."""
        return max(0.0, self._time_s - self.elapsed_s())

    def spent(self) -> Literal["calls", "time"] | None:
        """Return which part of it is used up."""
        if self.calls_left <= 0:
            return "calls"
        return "time" if self.time_left_s() <= 0 else None

    def words(self, spent: Literal["calls", "time"]) -> str:
        """Return which part is used up, in words."""
        if spent == "calls":
            return f"the episode's {self._calls} calls are used up; it has ended"
        return f"the episode's {self._time_s:g} s are used up; it has ended"
