"""Measurements: the value of every metric in every round, with medians."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Key: TypeAlias = tuple[str, str, str]
"""Metric, subject, and load ("64 sessions"); the last may be empty."""


@dataclass(slots=True)
class Measurements:
    """Values by metric, subject and load.

    Attributes:
        values: One value for each round.
        notes: What could not be measured, and why.
    """

    values: dict[Key, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, metric: str, subject: str, load: str, value: float) -> None:
        """Add one round's value."""
        self.values.setdefault((metric, subject, load), []).append(value)

    def median(self, metric: str, subject: str, load: str = "") -> float | None:
        """Return the median over the rounds; None if nothing was measured."""
        values = self.values.get((metric, subject, load))
        return None if values is None else statistics.median(values)

    def loads(self, metric: str) -> list[str]:
        """Return the loads under which a metric was measured, in order of measurement."""
        return list(dict.fromkeys(load for name, _, load in self.values if name == metric))

    def subjects(self, load: str) -> list[str]:
        """Return the subjects measured under a load, in order of measurement."""
        return list(dict.fromkeys(subject for _, subject, name in self.values if name == load))

    def as_json(self) -> dict[str, Any]:
        """Return the measurements and notes as JSON values."""
        return {"figures": list(self._rows()), "notes": self.notes}

    def add_json(self, document: Mapping[str, Any]) -> None:
        """Add measurements that `as_json` returned."""
        for row in document["figures"]:
            for value in row["rounds"]:
                self.add(row["figure"], row["of"], row["load"], value)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for (metric, subject, load), values in self.values.items():
            yield {
                "figure": metric,
                "of": subject,
                "load": load,
                "median": statistics.median(values),
                "rounds": values,
            }
