"""Figures that were looked at in equal windows, and whether they grow."""

import statistics
from dataclasses import dataclass
from itertools import combinations
from typing import Final

BYTES_AN_EPISODE: Final = 512.0
"""A slope of the memory below this is not told from what allocators do by themselves. A server of ours that holds
nothing has one of less than 100 in windows of a hundred episodes."""

BYTES_IN_ALL: Final = 32 * 1024
"""Growth below this is a few pages."""

FEWEST: Final = 3
"""Threads, or files, by which a server has to have grown."""

RISING: Final = 0.6
"""The share of windows that have to end higher than the one before, for memory to be on the rise."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How something went over the windows.

    Attributes:
        values: What there was at the end of each window; the warm-up's are not among them.
        episodes: Episodes a window.
    """

    values: tuple[int, ...]
    episodes: int

    @property
    def total(self) -> int:
        """By how much more there is at the end than there was at the beginning."""
        return self.values[-1] - self.values[0]

    @property
    def slope(self) -> float:
        """How much each episode adds: the median over all pairs of windows."""
        pairs = combinations(enumerate(self.values), 2)
        slopes = [(high - low) / (later - earlier) for (earlier, low), (later, high) in pairs]
        return statistics.median(slopes) / self.episodes

    @property
    def rising(self) -> float:
        """The share of windows that end higher than the one before."""
        steps = [high > low for low, high in zip(self.values, self.values[1:], strict=False)]
        return sum(steps) / len(steps)


def leaks_memory(growth: Growth) -> bool:
    """Whether memory grows steadily, and by more than allocators do."""
    return growth.slope > BYTES_AN_EPISODE and growth.total > BYTES_IN_ALL and growth.rising >= RISING


def leaks_things(growth: Growth) -> bool:
    """Whether threads or files grow: they do not by themselves, so a few are enough."""
    return growth.total >= FEWEST and growth.slope > 0
