"""What was looked at, and what was found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is."""

    GOOD = "good"
    ODD = "odd"
    """A run may be slow, or not what was meant."""
    BAD = "bad"
    """A run would fail."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: The thing.
        told: What was found and, where it is not good, what to do.
        level: How bad it is.
        metrics: What was measured, by name with its unit.
    """

    what: str
    told: str
    level: Severity = Severity.GOOD
    metrics: Mapping[str, float] = field(default_factory=dict)
