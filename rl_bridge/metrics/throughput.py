"""A run's throughput in an interval, and how its processes spent it."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from rl_bridge.errors import StatusError
from rl_bridge.metrics.spans import SpanTotals, SpanWindow, group_by_role
from rl_bridge.metrics.status import StatusSnapshot

TRAINED_STATE: Final = "trained"
"""The state in `StatusSnapshot.groups` of groups that went to the trainer."""
GROUPS: Final = "rollout/groups"
"""A metric of each iteration: the number of groups that it was trained on."""
ELAPSED: Final = "time/elapsed_s"
"""A metric of each iteration: wall time of training so far, without set-up, over all resumptions."""

TARGETS: Final[Mapping[str, float]] = MappingProxyType({"rollout": 0.8, "policy": 0.8, "trainer": 0.9})
"""The share of its time that a role should be busy: rollout workers, generators and the trainer."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Throughput:
    """A run's work in an interval.

    Attributes:
        seconds: Its length.
        steps: Training steps that ended in it.
        groups: Groups that went to the trainer in it; None if unknown.
        roles: How the processes of each role spent it.
    """

    seconds: float
    steps: int
    groups: int | None
    roles: Mapping[str, SpanTotals]

    @property
    def unaccounted(self) -> float:
        """The largest unaccounted share of any role's time."""
        shares = [
            totals.unaccounted_s / totals.wall_s for totals in self.roles.values() if totals.wall_s > 0.0
        ]
        return max(shares, default=0.0)

    def utilisation(self, role: str) -> float | None:
        """Return the share of a role's time in which it had something to do; None if there is no such role."""
        totals = self.roles.get(role)
        if totals is None or totals.wall_s <= 0.0:
            return None
        return 1.0 - (totals.rest_s + totals.unaccounted_s) / totals.wall_s

    def meets_target(self, role: str) -> bool | None:
        """Whether a role reaches its target; None if it has none, or does not exist."""
        busy, target = self.utilisation(role), TARGETS.get(role)
        return None if busy is None or target is None else busy >= target

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "seconds": self.seconds,
            "steps": self.steps,
            "groups": self.groups,
            "unaccounted": self.unaccounted,
            "utilisation": {role: self.utilisation(role) for role in self.roles},
            "targets": {
                role: {"at_least": target, "met": self.meets_target(role)}
                for role, target in TARGETS.items()
                if self.meets_target(role) is not None
            },
            "roles": {role: totals.as_json() for role, totals in self.roles.items()},
        }

    @classmethod
    def from_snapshots(cls, earlier: StatusSnapshot, later: StatusSnapshot) -> Self:
        """Measure between two snapshots; StatusError if they are of different runs, or the run went back."""
        if earlier.began != later.began or later.version < earlier.version:
            raise StatusError(
                f"expected one run that goes on, got version {earlier.version} of {earlier.name!r} and then "
                f"{later.version} of {later.name!r}; it went back to a checkpoint, or another run has the address: "
                "measure again"
            )
        window = SpanWindow()
        window.advance(earlier.spans)
        counted = TRAINED_STATE in earlier.groups and TRAINED_STATE in later.groups
        return cls(
            seconds=later.taken - earlier.taken,
            steps=later.version - earlier.version,
            groups=later.groups[TRAINED_STATE] - earlier.groups[TRAINED_STATE] if counted else None,
            roles=group_by_role(window.advance(later.spans)),
        )

    @classmethod
    def from_log(cls, file: Path) -> Self:
        """Measure a run from its `metrics.jsonl`, except its first iteration; StatusError if that has too little."""
        merged: dict[str, SpanTotals] = {}
        seconds, steps, groups = 0.0, 0, 0.0
        for earlier, row in itertools.pairwise(_read_rows(file)):  # lazily: there may be a million rows
            elapsed = row[ELAPSED] - earlier[ELAPSED]
            for process, totals in SpanTotals.from_metrics(row, elapsed).items():
                merged[process] = merged[process].merge(totals) if process in merged else totals
            seconds, steps, groups = seconds + elapsed, steps + 1, groups + row.get(GROUPS, math.nan)
        if not merged:
            raise StatusError(
                f"expected at least two iterations with spans in {str(file)!r}, got fewer; "
                "let the run go on, or measure one that does"
            )
        return cls(
            seconds=seconds,
            steps=steps,
            groups=None if math.isnan(groups) else round(groups),
            roles=merged,
        )


def _read_rows(file: Path) -> Iterator[Mapping[str, float]]:
    try:
        with file.open(encoding="utf-8") as lines:
            yield from (row for row in map(_parse_row, lines) if ELAPSED in row)
    except OSError as error:
        raise StatusError(
            f"expected the metrics of a run in {str(file)!r}, got: {error.strerror}; name the folder of a run"
        ) from error


def _parse_row(line: str) -> Mapping[str, float]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}  # a killed run leaves its last line incomplete
    return row if isinstance(row, dict) else {}
