"""The replay buffer between rollouts and trainer: admission of groups, their staleness bound, and stragglers."""

import asyncio
import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from rl_bridge.buffer.ledger import GroupLease, Ledger, UnfinishedGroup
from rl_bridge.errors import ReplicaLostError, RolloutError, TrainerWentBackError, WeightsError
from rl_bridge.types import Group, PolicyVersion


class Admission:
    """Decides how many groups may start.

    Args:
        groups_per_batch: The number of groups in a step.
        max_staleness: The bound k.
        iterations: The number of steps of the whole run; groups that they cannot train are not started.
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
        """The version of the weights that every serving generator holds at least."""
        self._first_step: PolicyVersion = 0
        self._trained_before = 0

    def restart_from(self, version: PolicyVersion, *, trained: int) -> None:
        """Count groups from this version on: earlier, a resumed run may have had another number of groups per step."""
        self._first_step, self._trained_before = version, trained

    def startable_groups(self, live: int) -> int:
        """Return how many groups may start now; none if it is 0 or negative."""
        steps = min(self.served + self.max_staleness + 1, self._iterations)
        return (steps - self._first_step) * self.groups_per_batch - (live - self._trained_before)

    def oldest_allowed(self, version: PolicyVersion) -> PolicyVersion:
        """Return the oldest version of weights that a step from `version` may learn from."""
        return version - self.max_staleness

    def count_overdue(self, version: PolicyVersion, unfinished_versions: Sequence[PolicyVersion]) -> int:
        """Return how many of the unfinished groups, oldest first, the step from `version` has to wait for: rule (2).

        Args:
            version: The version of the trainer's weights.
            unfinished_versions: The oldest version that each unfinished group may come from, ascending.
        """
        last_steps = range(version, version + self.max_staleness + 1)
        return max(
            bisect_right(unfinished_versions, self.oldest_allowed(last_step))
            - (last_step - version) * self.groups_per_batch
            for last_step in last_steps
        )


CANCEL_GRACE_PERIOD_S = 10.0
"""How long a straggler's worker has to return the siblings that it has finished."""

STRAGGLER_CHECK_INTERVAL_S = 1.0
"""The longest time between two looks for stragglers, while a step waits for groups to be finished."""

STALE = "older than rollout.max_staleness allows"
STRAGGLER = "straggler"


class ReplayBuffer:
    """Holds finished groups for the trainer: at most `max_staleness + 1` steps' worth, leased groups included.

    Args:
        ledger: The state of all groups.
        admission: Bounds how far rollouts may run ahead of the trainer.
        timeout_s: How long `sample` waits while no group is added and no progress recorded.
        straggler_timeout_s: How long `sample` waits for a group that must not be left for the next step before it cuts
            it: the siblings finished by then are taken, or the group is dropped. None waits until it ends.
    """

    def __init__(
        self,
        ledger: Ledger,
        admission: Admission,
        *,
        timeout_s: float,
        straggler_timeout_s: float | None = None,
    ) -> None:
        self.ledger = ledger
        self.admission = admission
        self.cancel: Callable[[Sequence[GroupLease]], None] = lambda leases: None
        """Called with stragglers' leases: their producers must add what they have at once, or drop the lease."""
        self._timeout_s = timeout_s
        self._straggler_timeout_s = straggler_timeout_s
        self._groups: dict[int, Group] = {}
        self._group_versions: dict[int, PolicyVersion] = {}
        """Each group's version, which is computed once."""
        self._stragglers_cut = 0
        self._progressed_at = 0.0
        self._cancelled_leases: set[int] = set()
        self._failure: BaseException | None = None
        self._lease_possible = asyncio.Event()
        self._groups_changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[Group]:
        """The finished groups, by id."""
        return [group for _, group in sorted(self._groups.items())]

    def record_served(self, version: PolicyVersion) -> None:
        """Record that every serving generator has these weights or newer ones, so that more groups may start."""
        self.admission.served = version
        self._notify()

    def record_progress(self, at: float) -> None:
        """Record when an episode last made progress, by the event loop's clock; `sample` then goes on waiting."""
        self._progressed_at = max(self._progressed_at, at)

    async def lease(self) -> GroupLease:
        """Wait until a group may be played, and lease it. Raises what `fail` was called with."""
        while True:
            self._raise_failure()
            lease = self.ledger.lease(
                served=self.admission.served,
                now=asyncio.get_running_loop().time(),
                admit=self.admission.startable_groups(self.ledger.live) > 0,
            )
            if lease is not None:
                self._notify_sampler()  # it may have to wait for this group, with a deadline
                return lease
            await self._lease_possible.wait()

    async def add(self, group: Group, lease: GroupLease | None = None) -> bool:
        """Add a finished group.

        Args:
            group: The group.
            lease: The lease under which it was played. Without one this waits until a group may start, admits the group
                and gives it the next id.

        Returns:
            False if the lease is no longer current, and the group is discarded.
        """
        if lease is None:
            lease = await self.lease()
            group.id = lease.group
        if group.id != lease.group:
            raise ValueError(f"expected group {lease.group}, which was leased, got group {group.id}")
        if not self.ledger.complete(lease.id):
            return False
        self._groups[group.id], self._group_versions[group.id] = group, group.version
        self._cancelled_leases.discard(lease.id)
        self.record_progress(asyncio.get_running_loop().time())
        self._notify_sampler()
        return True

    def lose(self, lease: GroupLease, *, floor: PolicyVersion | None = None) -> bool:
        """Record that the work under a lease is lost; see `Ledger.lose`."""
        return self._end_lease(lease, self.ledger.lose(lease.id, floor=floor))

    def return_unfinished(self, lease: GroupLease, *, floor: PolicyVersion | None) -> bool:
        """Give a group back to be leased again; see `Ledger.return_unfinished`."""
        return self._end_lease(lease, self.ledger.return_unfinished(lease.id, floor=floor))

    def drop(self, lease: GroupLease, reason: str) -> bool:
        """Drop a leased group; see `Ledger.drop`."""
        return self._end_lease(lease, self.ledger.drop(lease.id, reason))

    async def sample(self, version: PolicyVersion, batch_size: int) -> list[Group]:
        """Take the groups of the step that begins from `version`.

        Args:
            version: The version of the trainer's weights.
            batch_size: The number of groups; it must be `Admission.groups_per_batch`.

        Returns:
            The oldest groups, ordered by id. None is staler than allowed.

        Raises:
            RolloutError: They are not there, and nothing makes progress any more.
            BaseException: What `fail` was called with.
        """
        if batch_size != self.admission.groups_per_batch:
            raise ValueError(
                f"expected a batch of {self.admission.groups_per_batch} groups, as many as are admitted for a step, "
                f"got {batch_size}"
            )
        began = check_at = asyncio.get_running_loop().time()
        while True:
            self._raise_failure()
            self._discard_stale(version)
            now = asyncio.get_running_loop().time()
            deadline = max(began, self._progressed_at) + self._timeout_s
            # While too few are finished only stragglers matter: thousands of groups are not looked at for each of them.
            if len(self._groups) >= batch_size or now >= check_at:
                blocking_groups = self._find_blocking_groups(version)
                if len(self._groups) >= batch_size and not blocking_groups:
                    return self._take_oldest(version, batch_size)
                check_at = self._check_stragglers(blocking_groups, began=began, now=now)
            if now >= deadline:
                raise RolloutError(
                    f"expected {batch_size} groups for the step from version {version}, got {len(self._groups)}, with "
                    f"{len(self.ledger.leases)} under way, and none has made progress for {self._timeout_s:g} s; see "
                    "what the environment is waiting for, or raise rollout.timeout_s"
                )
            await self._wait_for_groups(min(check_at, deadline) - now)

    def take_stragglers_cut(self) -> int:
        """Return how many groups were cut since the last call."""
        cut, self._stragglers_cut = self._stragglers_cut, 0
        return cut

    def fail(self, failure: BaseException) -> None:
        """Have every waiter, now and later, raise `failure`: no more groups will come."""
        self._failure = self._failure or failure
        self._notify()

    def state(self) -> tuple[dict[str, Any], list[Group]]:
        """Return the state for a checkpoint: the ledger as a JSON object, and its finished groups.

        It is a snapshot of this moment: finished groups are never modified.
        """
        return self.ledger.state(), self.groups

    def restore(self, ledger: dict[str, Any], groups: Sequence[Group], *, served: PolicyVersion) -> None:
        """Go back to a state; leases made since then are void.

        Raises:
            RolloutError: The groups are not those that the ledger lists as finished.
        """
        finished = {group.id: group for group in groups}
        if sorted(finished) != sorted(ledger["finished"]):
            raise RolloutError(
                f"expected the checkpoint to hold the finished groups {sorted(ledger['finished'])}, "
                f"got {sorted(finished)}; it is damaged, or of an earlier version: resume from an older one"
            )
        if isinstance(self._failure, ReplicaLostError | TrainerWentBackError | WeightsError):
            self._failure = None  # going back has repaired what failed
        self.ledger.restore(ledger)
        self.admission.restart_from(served, trained=self.ledger.trained)
        self._groups = finished
        self._group_versions = {number: group.version for number, group in finished.items()}
        self._cancelled_leases.clear()
        self.record_served(served)

    def _discard_stale(self, version: PolicyVersion) -> None:
        """Discard groups beyond the staleness bound.

        There are some only if a run resumes with a smaller bound, or a producer adds groups without a lease.
        """
        oldest_allowed = self.admission.oldest_allowed(version)
        for number in [
            number for number, version in self._group_versions.items() if version < oldest_allowed
        ]:
            del self._groups[number], self._group_versions[number]
            self.ledger.discard(number, STALE)
            self._notify()

    def _find_blocking_groups(self, version: PolicyVersion) -> list[UnfinishedGroup]:
        unfinished = self.ledger.unfinished_groups(served=self.admission.served)
        overdue = self.admission.count_overdue(version, [group.floor for group in unfinished])
        return unfinished[: max(overdue, 0)]

    def _check_stragglers(self, blocking: Sequence[UnfinishedGroup], *, began: float, now: float) -> float:
        """Cut the stragglers among the groups that a step waits for; returns when to look again.

        That is soon, as with every lease a step may have to wait for one more group, however old.
        """
        if (timeout_s := self._straggler_timeout_s) is None:
            return math.inf
        leases = [group.lease for group in blocking if group.lease is not None]
        checks = [
            self._check_straggler(lease, max(began, lease.since) + timeout_s, now=now) for lease in leases
        ]
        return min([now + STRAGGLER_CHECK_INTERVAL_S, *checks])

    def _check_straggler(self, lease: GroupLease, deadline: float, *, now: float) -> float:
        """Cut a straggler when its time is up, and drop it if that did not help; returns when to check again."""
        if now < deadline:
            return deadline
        if lease.id not in self._cancelled_leases:
            self._cancelled_leases.add(lease.id)
            self._stragglers_cut += 1
            self.cancel([lease])
        if now < deadline + CANCEL_GRACE_PERIOD_S:
            return deadline + CANCEL_GRACE_PERIOD_S
        self.drop(lease, STRAGGLER)
        return now

    def _take_oldest(self, version: PolicyVersion, batch_size: int) -> list[Group]:
        oldest_first = sorted(self._groups, key=lambda number: (self._group_versions[number], number))
        groups = []
        for number in sorted(oldest_first[:batch_size]):
            groups.append(self._groups.pop(number))
            del self._group_versions[number]
            self.ledger.train(number, version)
        return groups

    def _end_lease(self, lease: GroupLease, outcome: bool) -> bool:
        self._cancelled_leases.discard(lease.id)
        self._notify()
        return outcome

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _notify(self) -> None:
        self._lease_possible.set()
        self._lease_possible = asyncio.Event()
        self._notify_sampler()

    def _notify_sampler(self) -> None:
        self._groups_changed.set()
        self._groups_changed = asyncio.Event()

    async def _wait_for_groups(self, timeout_s: float) -> None:
        change = self._groups_changed.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await change
