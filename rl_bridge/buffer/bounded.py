"""Groups that wait for the trainer, and the bound on how stale they may become.

The buffer never throws away what is still allowed, and never hands out what is not. Its room is bounded:
a producer that finds it full is told so and has to wait, which is how a bound of 0 keeps a synchronous loop
exact instead of starving it.
"""

from collections import deque
from collections.abc import Iterable

from rl_bridge.errors import RolloutError
from rl_bridge.types import Group, PolicyVersion


class ReplayBuffer:
    """First in, first out, with a bound on staleness.

    Args:
        capacity: Groups at most.
        max_staleness: How many versions old the oldest token of a group may be when it is taken.
    """

    def __init__(self, *, capacity: int, max_staleness: int) -> None:
        if capacity < 1 or max_staleness < 0:
            raise ValueError(
                f"expected capacity >= 1 and max_staleness >= 0, got {capacity} and {max_staleness}"
            )
        self._groups: deque[Group] = deque()
        self._capacity = capacity
        self._max_staleness = max_staleness
        self.dropped_stale = 0
        """Groups that had become too stale before anyone took them."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def room(self) -> int:
        """How many more groups fit."""
        return self._capacity - len(self._groups)

    def put(self, groups: Iterable[Group]) -> None:
        """Add groups at the end.

        Raises:
            RolloutError: They do not all fit; none was added.
        """
        incoming = list(groups)
        if len(incoming) > self.room:
            raise RolloutError(
                f"expected at most {self.room} more groups in the replay buffer, got {len(incoming)}; take some first"
            )
        self._groups.extend(incoming)

    def take(self, count: int, *, version: PolicyVersion) -> list[Group]:
        """Remove and return up to `count` groups, oldest first, none staler than allowed.

        Args:
            count: How many are wanted.
            version: The trainer's current one. Groups too stale for it are dropped and counted.
        """
        taken: list[Group] = []
        while self._groups and len(taken) < count:
            group = self._groups.popleft()
            if version - group.version > self._max_staleness:
                self.dropped_stale += 1
            else:
                taken.append(group)
        return taken
