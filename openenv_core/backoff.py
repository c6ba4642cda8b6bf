"""Exponential back-off: the pauses between attempts, shared by everything that retries or restarts."""

import random
from typing import Final

_MAX_DOUBLINGS: Final = 64  # far beyond any limit; from 1024 on, a float would overflow


def exponential_pause_s(failures: int, min_s: float, max_s: float) -> float:
    """Return the pause after a number of failures in a row, in seconds.

    It is `min_s` after the first, twice as long after each further one, and never longer than `max_s`.
    """
    doublings = min(max(failures - 1, 0), _MAX_DOUBLINGS)
    return min(min_s * 2.0**doublings, max_s)


class Backoff:
    """Exponential back-off: each pause is twice the last; jitter takes off up to half of it.

    Args:
        min_s: The first pause, in seconds.
        max_s: The longest pause, in seconds.
    """

    def __init__(self, min_s: float = 0.05, max_s: float = 2.0) -> None:
        self._min_s, self._max_s = min_s, max_s
        self.reset()

    def reset(self) -> None:
        """Start over with the shortest pause."""
        self._failures = 0

    def next_s(self, requested_s: float = 0.0) -> float:
        """Return the next pause in seconds: the longer of back-off and server's request, less jitter of up to half."""
        self._failures += 1
        pause_s = exponential_pause_s(self._failures, self._min_s, self._max_s)
        return max(pause_s, min(requested_s, self._max_s)) * random.uniform(0.5, 1.0)
