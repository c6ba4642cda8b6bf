"""How far ahead of the trainer rollouts may run: the bound on staleness, kept by not starting too much.

A group is trained from some version v; its staleness is v minus the oldest weights behind any of its tokens. To keep
that at most k, a group may start only while

    admitted - dropped < (served + k + 1) * groups_per_batch                                                   (1)

where `served` is what every generator holds at least. A group that started under weights s can be trained from version
s + k at the latest. Call that its last step. A step takes B = `groups_per_batch` groups, those with the earliest last
steps first, and it waits for groups under way as long as more of them are left than the steps to come have room for:

    for every d >= v: the groups under way whose last step is d or earlier are at most (d - v) * B                (2)

Why that is enough: at version v, at most (d - v + 1) * B groups are left whose last step is d or earlier. By (1) that
is so when they start, as v steps have taken v * B. It stays so: a step takes B of them, or all that are finished, and
then (2) bounds the rest. So waiting always ends, no bound is ever broken, and nothing is thrown away for being old.
With k = 0 a step's groups start when the step's weights are served, and nothing else does: the loop is synchronous.
"""

from bisect import bisect_right
from collections.abc import Sequence

from rl_bridge.types import PolicyVersion


class Admission:
    """Says how many groups may start.

    Args:
        groups_per_batch: Groups a step.
        max_staleness: The bound k.
        iterations: Steps of the whole run; what they cannot train is not started.
    """

    def __init__(self, *, groups_per_batch: int, max_staleness: int, iterations: int) -> None:
        if groups_per_batch < 1 or max_staleness < 0 or iterations < 0:
            raise ValueError(
                "expected groups_per_batch >= 1, max_staleness >= 0 and iterations >= 0, "
                f"got {groups_per_batch}, {max_staleness} and {iterations}"
            )
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self._iterations = iterations
        self.served: PolicyVersion = 0
        """The weights that every serving generator holds at least."""
        self._first_step: PolicyVersion = 0
        self._trained_before = 0

    def begin_from(self, version: PolicyVersion, *, trained: int) -> None:
        """Count from here on: a resumed run may have taken another number of groups a step before.

        Args:
            version: The next step's.
            trained: Groups that the steps before it have taken.
        """
        self._first_step, self._trained_before = version, trained

    def room(self, live: int) -> int:
        """How many groups may start now; none or fewer where it is 0 or below.

        Args:
            live: Groups admitted and not dropped.
        """
        steps = min(self.served + self.max_staleness + 1, self._iterations)
        return (steps - self._first_step) * self.groups_per_batch - (live - self._trained_before)

    def oldest(self, version: PolicyVersion) -> PolicyVersion:
        """The oldest weights that a step from `version` may learn from."""
        return version - self.max_staleness

    def overdue(self, version: PolicyVersion, under_way: Sequence[PolicyVersion]) -> int:
        """How many of the groups under way, oldest first, the step from `version` has to wait for: rule (2).

        Args:
            version: The trainer's weights.
            under_way: The oldest weights that each group under way may come from, ascending.
        """
        last_steps = range(version, version + self.max_staleness + 1)
        return max(
            bisect_right(under_way, self.oldest(last_step)) - (last_step - version) * self.groups_per_batch
            for last_step in last_steps
        )
