"""What was measured: every round's value of every figure, and their medians."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Key: TypeAlias = tuple[str, str, str]
"""Which figure, of whom, and under what load ("64 sessions"); the last may be empty."""


@dataclass(slots=True)
class Figures:
    """Values by what they are of.

    Attributes:
        values: One value a round.
        notes: What could not be measured, and why.
    """

    values: dict[Key, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, figure: str, who: str, load: str, value: float) -> None:
        """Add one round's value."""
        self.values.setdefault((figure, who, load), []).append(value)

    def median(self, figure: str, who: str, load: str = "") -> float | None:
        """Return the median over the rounds; None where nothing was measured."""
        values = self.values.get((figure, who, load))
        return None if values is None else statistics.median(values)

    def loads(self, figure: str) -> list[str]:
        """Return the loads under which a figure was measured, in the order of measuring."""
        return list(dict.fromkeys(load for name, _, load in self.values if name == figure))

    def contestants(self, load: str) -> list[str]:
        """Return who was measured under a load, in the order of measuring."""
        return list(dict.fromkeys(who for _, who, name in self.values if name == load))

    def as_json(self) -> dict[str, Any]:
        """Return everything, for a file."""
        return {"figures": list(self._rows()), "notes": self.notes}

    def take(self, found: Mapping[str, Any]) -> None:
        """Add what `as_json` has told."""
        for row in found["figures"]:
            for value in row["rounds"]:
                self.add(row["figure"], row["of"], row["load"], value)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for (figure, who, load), values in self.values.items():
            yield {
                "figure": figure,
                "of": who,
                "load": load,
                "median": statistics.median(values),
                "rounds": values,
            }
