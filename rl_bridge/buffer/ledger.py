"""The ledger of groups: which lease each group is under, and whether it was trained or dropped.

A group is admitted once in a run; ids count up from 0. It is leased to a worker; only a result under the current lease
counts, any other is discarded. So a group is trained at most once, however often it was leased.

    admitted -> leased -> finished -> trained
                  |  ^        |
             lost v  |        v
                waiting -> dropped
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl_bridge.types import PolicyVersion


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupLease:
    """The right to finish one group, until the ledger leases that group again.

    Attributes:
        id: Unique within a process, even across a rewind.
        group: The group's number in the run.
        attempt: The number of this lease among the group's leases, from 1.
        floor: No token of the group will come from older weights than this version.
        since: The time of the lease, in seconds of the caller's clock.
        first: The number of the first group to start, or to be started, under the weights that are served.
        losses: How often the work on the group has been lost before.
    """

    id: int
    group: int
    attempt: int
    floor: PolicyVersion
    since: float
    first: int
    losses: int = 0


class UnfinishedGroup(NamedTuple):
    """A group that is not finished. There can be thousands, so it is a tuple, which is made quickly.

    Attributes:
        floor: No token of it will come from older weights than this version.
        lease: Its current lease; None if it waits for one.
    """

    floor: PolicyVersion
    lease: GroupLease | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class Fate:
    """The end of a group: trained in the step that began from `version`, or dropped for `reason`."""

    group: int
    version: PolicyVersion | None = None
    reason: str | None = None


@dataclass(kw_only=True, slots=True)
class _WaitingGroup:
    """A group that waits to be leased again.

    Attributes:
        floor: The oldest version of weights in the outcomes kept of it; None if none are kept.
    """

    group: int
    attempts: int
    losses: int
    floor: PolicyVersion | None = None


class Ledger:
    """Keeps the state of all groups. Every change is one synchronous call.

    Args:
        max_losses: How often the work on a group may be lost before the group is dropped; None for no limit.
    """

    def __init__(self, *, max_losses: int | None) -> None:
        self._max_losses = max_losses
        self._waiting: deque[_WaitingGroup] = deque()
        self._leases: dict[int, GroupLease] = {}
        self._finished: set[int] = set()
        self.next_lease = 0
        """The id of the next lease."""
        self._served: PolicyVersion | None = None
        self._first_group = 0
        self.admitted = 0
        """The number of groups so far, which is also the id of the next."""
        self.trained = 0
        """The number of groups handed to the trainer."""
        self.dropped: Counter[str] = Counter()
        """The number of groups dropped, by reason."""
        self.late = 0
        """The number of results under a lease that was not current. They changed nothing."""
        self.lost = 0
        """The number of lost leases; their groups wait to be leased again or were dropped."""
        self.on_fate: Callable[[Fate], None] = lambda fate: None
        """Called with each group's fate."""

    @property
    def live(self) -> int:
        """The number of groups admitted and not dropped: those trained, finished, leased or waiting."""
        return self.admitted - self.dropped.total()

    @property
    def leases(self) -> list[GroupLease]:
        """The current leases, oldest first."""
        return list(self._leases.values())

    @property
    def waiting(self) -> int:
        """The number of groups whose work was lost or given back, and that are not leased."""
        return len(self._waiting)

    @property
    def finished(self) -> frozenset[int]:
        """Groups that wait for the trainer."""
        return frozenset(self._finished)

    def lease(self, *, served: PolicyVersion, now: float, admit: bool) -> GroupLease | None:
        """Lease the next group: a waiting one first, else a new one.

        Args:
            served: The version of the weights that every generator holds at least.
            now: The current time, in seconds.
            admit: Whether a new group may start.

        Returns:
            The lease; None if no group waits and no new one may start.
        """
        if served != self._served:
            self._served, self._first_group = served, self.admitted
        if self._waiting:
            waiting_group = self._waiting.popleft()
        elif admit:
            waiting_group = _WaitingGroup(group=self.admitted, attempts=0, losses=0)
            self.admitted += 1
        else:
            return None
        lease = GroupLease(
            id=self.next_lease,
            group=waiting_group.group,
            attempt=waiting_group.attempts + 1,
            floor=served if waiting_group.floor is None else min(served, waiting_group.floor),
            since=now,
            first=self._first_group,
            losses=waiting_group.losses,
        )
        self.next_lease += 1
        self._leases[lease.id] = lease
        return lease

    def complete(self, lease: int) -> bool:
        """Record that a group is finished and waits for the trainer; False if the lease is no longer current."""
        ended_lease = self._end_lease(lease)
        if ended_lease is None:
            return False
        self._finished.add(ended_lease.group)
        return True

    def lose(self, lease: int, *, floor: PolicyVersion | None = None) -> bool:
        """Record that a group's work is lost: it waits again, ahead of new groups, or is dropped.

        Args:
            lease: The id of the lease under which it was lost.
            floor: The oldest version of weights in the outcomes kept of the group; None if none are kept.

        Returns:
            Whether the group waits again.
        """
        ended_lease = self._end_lease(lease)
        if ended_lease is None:
            return False
        self.lost += 1
        losses = ended_lease.losses + 1
        if self._max_losses is not None and losses > self._max_losses:
            self._drop(ended_lease.group, f"lost {losses} times")
            return False
        self._wait_again(ended_lease, losses, floor)
        return True

    def return_unfinished(self, lease: int, *, floor: PolicyVersion | None) -> bool:
        """Record that a preempted worker gave its group back: it waits again, without counting as a loss.

        Args:
            lease: The id of the worker's lease.
            floor: The oldest version of weights in the outcomes kept of the group; None if none are kept.

        Returns:
            False if the lease was not current.
        """
        ended_lease = self._end_lease(lease)
        if ended_lease is None:
            return False
        self._wait_again(ended_lease, ended_lease.losses, floor)
        return True

    def _wait_again(self, lease: GroupLease, losses: int, floor: PolicyVersion | None) -> None:
        self._waiting.append(
            _WaitingGroup(group=lease.group, attempts=lease.attempt, losses=losses, floor=floor)
        )

    def drop(self, lease: int, reason: str) -> bool:
        """Drop a leased group; False if the lease is no longer current."""
        ended_lease = self._end_lease(lease)
        if ended_lease is None:
            return False
        self._drop(ended_lease.group, reason)
        return True

    def discard(self, group: int, reason: str) -> None:
        """Drop a finished group.

        Raises:
            KeyError: The group does not wait for the trainer.
        """
        self._finished.remove(group)
        self._drop(group, reason)

    def train(self, group: int, version: PolicyVersion) -> None:
        """Record that a finished group is trained in the step that begins from `version`."""
        self._finished.remove(group)
        self.trained += 1
        self.on_fate(Fate(group=group, version=version))

    def unfinished_groups(self, *, served: PolicyVersion) -> list[UnfinishedGroup]:
        """Return every group that is leased or waits for a lease, ordered by floor, oldest first."""
        groups = [UnfinishedGroup(floor=lease.floor, lease=lease) for lease in self._leases.values()]
        groups += [
            UnfinishedGroup(floor=served if waiting_group.floor is None else min(served, waiting_group.floor))
            for waiting_group in self._waiting
        ]
        return sorted(groups, key=lambda group: group.floor)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as a JSON object. Leased groups become waiting ones to be played again."""
        waiting = [
            (waiting_group.group, waiting_group.attempts, waiting_group.losses)
            for waiting_group in self._waiting
        ]
        waiting += [
            (lease.group, lease.attempt, lease.losses)
            for lease in sorted(self._leases.values(), key=lambda lease: lease.group)
        ]
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "late": self.late,
            "lost": self.lost,
            "waiting": waiting,
            "finished": sorted(self._finished),
            "next_lease": self.next_lease,
            "served": self._served,
            "first": self._first_group,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a state. Leases made since then are void: results that still arrive under them are late."""
        self._leases.clear()
        self._waiting = deque(
            _WaitingGroup(group=group, attempts=attempts, losses=losses)
            for group, attempts, losses in state["waiting"]
        )
        self._finished = set(state["finished"])
        self.next_lease = max(self.next_lease, state["next_lease"])
        self.admitted = state["admitted"]
        self._served, self._first_group = state["served"], state["first"]
        self.trained = state["trained"]
        self.dropped = Counter(state["dropped"])
        self.late = state["late"]
        self.lost = state["lost"]

    def _end_lease(self, lease: int) -> GroupLease | None:
        ended_lease = self._leases.pop(lease, None)
        self.late += ended_lease is None
        return ended_lease

    def _drop(self, group: int, reason: str) -> None:
        self.dropped[reason] += 1
        self.on_fate(Fate(group=group, reason=reason))
