"""Figures that are gathered in many processes and merged: counts, and distributions with quantiles.

Merging is exact for counts, means and extremes, and never makes a quantile worse: the buckets of a distribution grow
geometrically, as in DDSketch (arXiv 1908.10693), so every quantile is within `ACCURACY` of a value that was observed.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Self

ACCURACY: Final = 0.01
"""The relative error of a quantile at most."""
_GROWTH: Final = math.log((1.0 + ACCURACY) / (1.0 - ACCURACY))
_LEAST: Final = 1e-9
"""Values no larger than this, in magnitude, count as 0: the number of buckets is bounded."""


@dataclass(slots=True)
class Distribution:
    """How values of one kind are spread.

    Attributes:
        count: How many there were.
        total: Their sum.
        least: The smallest; infinite where there was none.
        most: The largest.
        buckets: How many fell where: by the sign of the values and the logarithm of their magnitude.
    """

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    buckets: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, value: float) -> None:
        """Count one value.

        Raises:
            ValueError: It is infinite, or no number.
        """
        if not math.isfinite(value):
            raise ValueError(f"expected a finite value, got {value}")
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)
        bucket = _bucket(value)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def merge(self, other: Self) -> None:
        """Take in what another has counted."""
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)
        for bucket, number in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + number

    @property
    def mean(self) -> float:
        """The arithmetic mean; NaN of nothing."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The value that a share of all values does not exceed; NaN of nothing.

        Args:
            share: From 0 to 1; 0.99 for the 99th percentile.
        """
        rank = max(1, math.ceil(share * self.count))
        seen = 0
        for bucket in sorted(self.buckets, key=_middle):
            seen += self.buckets[bucket]
            if seen >= rank:
                return min(max(_middle(bucket), self.least), self.most)
        return math.nan


def _bucket(value: float) -> tuple[int, int]:
    if abs(value) <= _LEAST:
        return 0, 0
    return (1 if value > 0 else -1), math.ceil(math.log(abs(value)) / _GROWTH)


def _middle(bucket: tuple[int, int]) -> float:
    sign, power = bucket
    # Between the bucket's edges, as far from either in proportion.
    return sign * math.exp(power * _GROWTH) * (1.0 - ACCURACY)


@dataclass(slots=True)
class Accumulator:
    """Named counts and distributions. It pickles, so a process hands its own to whoever merges them.

    Attributes:
        counts: Sums by name.
        distributions: By name.
    """

    counts: dict[str, float] = field(default_factory=dict)
    distributions: dict[str, Distribution] = field(default_factory=dict)

    def count(self, name: str, number: float = 1.0) -> None:
        """Add to a sum."""
        self.counts[name] = self.counts.get(name, 0.0) + number

    def observe(self, name: str, value: float) -> None:
        """Add a value to a distribution."""
        self.distributions.setdefault(name, Distribution()).add(value)

    def merge(self, other: Self) -> None:
        """Take in what another has gathered."""
        for name, number in other.counts.items():
            self.count(name, number)
        for name, distribution in other.distributions.items():
            self.distributions.setdefault(name, Distribution()).merge(distribution)

    @classmethod
    def merged(cls, parts: Iterable[Self]) -> Self:
        """What several have gathered together."""
        whole = cls()
        for part in parts:
            whole.merge(part)
        return whole

    def take(self) -> Self:
        """What has been gathered, which begins anew: nothing is handed over twice."""
        taken = type(self)(self.counts, self.distributions)
        self.counts, self.distributions = {}, {}
        return taken

    def figures(self) -> dict[str, float]:
        """Counts by name; of each distribution its mean, median, 99th percentile and maximum."""
        figures = dict(self.counts)
        for name, values in self.distributions.items():
            figures[f"{name}/mean"] = values.mean
            figures[f"{name}/p50"] = values.quantile(0.5)
            figures[f"{name}/p99"] = values.quantile(0.99)
            figures[f"{name}/max"] = values.most
        return figures
