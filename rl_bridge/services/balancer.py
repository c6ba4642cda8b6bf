"""Load balancing of calls over replicas: waits for one, picks the least loaded, detects lost ones and retries.

Also keeps the fan-outs that define the replicas' state and replays the last of each on replicas that start.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_bridge.errors import NoReplicaError, ReplicaLostError, StateUnavailableError

SUSPECT_AFTER = 3
"""The number of failed calls in a row after which a replica is suspect."""
MIN_SUSPENSION_S = 0.5
MAX_SUSPENSION_S = 30.0


class TargetGoneError(ConnectionError):
    """The process behind a target is gone; raised only by targets, never by code that runs in that process."""


Key = tuple[int, int]
"""A replica's id and the number of its start."""


class ReplicaTarget(Protocol):
    """One start of one replica, to which calls can be sent."""

    @property
    def replica(self) -> int:
        """The replica's id, which stays the same over restarts."""

    @property
    def incarnation(self) -> int:
        """Counts the replica's starts."""

    async def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call an endpoint on all ranks, return the first rank's value; TargetGoneError if a process is gone."""

    def first_rank(self) -> "ReplicaTarget":
        """Return a target whose calls go to the first rank alone."""


def key_of(target: ReplicaTarget) -> Key:
    """Return the key that identifies this start of this replica."""
    return target.replica, target.incarnation


@dataclass(slots=True)
class _TargetLoad:
    """A target with its load and its record of failures."""

    target: ReplicaTarget
    in_flight: int = 0
    last_pick: int = 0
    failures: int = 0
    suspended_until: float = 0.0
    suspension_s: float = 0.0


class Balancer:
    """Spreads calls over a changing set of targets and suspends targets whose calls keep failing.

    A replica that fails fast always has the fewest calls in flight. So after some failures in a row it is suspended:
    for a while calls go to other replicas, if any; afterwards a single failure suspends it for twice as long. A
    successful call ends that.

    Args:
        service: The service's name, for errors.
        repeatable: Endpoints that are retried on another target if one is lost.
        wait_s: Seconds that a call waits while there is no target.
        on_gone: Called with a target whose process is gone, and the reason.
        on_suspect: Called with a target whose calls keep failing.
    """

    def __init__(
        self,
        service: str,
        repeatable: frozenset[str] = frozenset(),
        wait_s: float = 0.0,
        *,
        on_gone: Callable[[ReplicaTarget, str], None] = lambda _target, _reason: None,
        on_suspect: Callable[[ReplicaTarget], None] = lambda _target: None,
    ) -> None:
        self._service = service
        self.repeatable = repeatable
        self.wait_s = wait_s
        self._on_gone = on_gone
        self._on_suspect = on_suspect
        self._loads: dict[int, _TargetLoad] = {}
        self._pick_count = 0
        self._calls_in_flight: dict[Key, set[asyncio.Future[Any]]] = {}
        self._loss_reasons: dict[Key, str] = {}
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._sessions: Counter[Key] = Counter()
        self._salt = random.randrange(1 << 30)
        """Breaks ties differently in each balancer, so that many callers do not all start with the same replica."""

    @property
    def targets(self) -> tuple[ReplicaTarget, ...]:
        """The targets that calls can go to now."""
        return tuple(load.target for load in self._loads.values())

    def in_flight(self, replica: int) -> int:
        """Return the number of a replica's calls in flight, over all of its starts."""
        return sum(
            len(calls) for (replica_id, _), calls in self._calls_in_flight.items() if replica_id == replica
        )

    def is_suspended(self, replica: int) -> bool:
        """Whether a replica is suspended because its calls keep failing."""
        load = self._loads.get(replica)
        return load is not None and load.suspended_until > time.monotonic()

    def add(self, target: ReplicaTarget) -> None:
        """Add a target; it replaces an earlier start of the same replica."""
        self._loads[target.replica] = _TargetLoad(target)
        self._changed.set()

    def remove(self, target: ReplicaTarget) -> None:
        """Send no more calls to a target; calls in flight go on."""
        if self.holds(target):
            del self._loads[target.replica]
            self._changed.set()

    async def wait_idle(self, target: ReplicaTarget) -> None:
        """Wait until a target that gets no more calls has none in flight."""
        while calls := self._calls_in_flight.get(key_of(target)):
            await asyncio.wait(calls)

    def lose(self, key: Key, reason: str) -> None:
        """End the calls to a target whose process is gone, and send no more to it."""
        load = self._loads.get(key[0])
        if load is not None and key_of(load.target) == key:
            self.remove(load.target)
        if self._calls_in_flight.get(key):
            self._loss_reasons[key] = reason
            for call in self._calls_in_flight[key]:
                call.cancel()

    def replace(self, targets: Iterable[ReplicaTarget]) -> None:
        """Replace the set of targets; targets that stay keep their loads."""
        new_targets = {key_of(target): target for target in targets}
        for current in self.targets:
            if key_of(current) not in new_targets:
                self.remove(current)
        for target in new_targets.values():
            if not self.holds(target):
                self.add(target)

    def holds(self, target: ReplicaTarget) -> bool:
        """Whether calls go to this start of the replica."""
        return self._find_load(target) is not None

    def _find_load(self, target: ReplicaTarget) -> _TargetLoad | None:
        load = self._loads.get(target.replica)
        return load if load is not None and key_of(load.target) == key_of(target) else None

    def bind_session(self, near: ReplicaTarget | None, max_sessions: int) -> ReplicaTarget | None:
        """Bind a session to a target until `release_session`; None if there is no target now.

        It is the target `near` while that has fewer than `max_sessions` sessions, otherwise the one with the fewest.
        """
        available = [target for target in self.targets if not self.is_suspended(target.replica)]
        if not (candidates := available or list(self.targets)):
            return None
        least_bound = min(
            candidates,
            key=lambda candidate: (self._sessions[key_of(candidate)], hash((self._salt, candidate.replica))),
        )
        preferred = [
            candidate for candidate in candidates if near is not None and key_of(candidate) == key_of(near)
        ]
        target = (
            preferred[0] if preferred and self._sessions[key_of(preferred[0])] < max_sessions else least_bound
        )
        self._sessions[key_of(target)] += 1
        return target

    def release_session(self, target: ReplicaTarget) -> None:
        """Release a session's binding to a target."""
        self._sessions[key_of(target)] -= 1
        if not self._sessions[key_of(target)]:
            del self._sessions[key_of(target)]

    def fail(self, failure: Exception) -> None:
        """Have every call that needs a target raise `failure` from now on."""
        self._failure = failure
        self._changed.set()

    async def wait_for_target(self, pick: Callable[[], ReplicaTarget | None] | None = None) -> ReplicaTarget:
        """Wait until there is a target: by default the least loaded.

        Raises NoReplicaError after the deadline, or the failure passed to `fail`.
        """
        pick = pick or self.pick_least_loaded
        if (target := self._pick(pick)) is not None:
            return target
        try:
            async with asyncio.timeout(self.wait_s):
                while (target := self._pick(pick)) is None:
                    self._changed.clear()
                    await self._changed.wait()
                return target
        except TimeoutError as error:
            raise NoReplicaError(
                f"expected a replica of {self._service} to serve within {self.wait_s:g} s, none did; "
                "see its log for why it does not start, or give it longer (start_timeout_s)"
            ) from error

    def _pick(self, pick: Callable[[], ReplicaTarget | None]) -> ReplicaTarget | None:
        if self._failure is not None:
            raise self._failure
        return pick()

    def pick_least_loaded(self) -> ReplicaTarget | None:
        """Return the target with the fewest calls, among equals the one picked longest ago; None if there is none.

        If all are suspended, it is the one whose suspension ends first.
        """
        now, loads = time.monotonic(), self._loads.values()
        if available := [load for load in loads if load.suspended_until <= now]:
            return min(available, key=lambda load: (load.in_flight, load.last_pick)).target
        return min(loads, key=lambda load: load.suspended_until).target if loads else None

    async def route(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        pick: Callable[[], ReplicaTarget | None] | None = None,
    ) -> Any:
        """Call an endpoint of one replica: by default the least loaded.

        Raises ReplicaLostError if the replica died and the endpoint is not repeatable.
        """
        while True:
            target = await self.wait_for_target(pick)
            try:
                return await self.call(target, name, args, kwargs)
            except ReplicaLostError:
                if name not in self.repeatable or self.holds(target):
                    raise

    async def call(
        self, target: ReplicaTarget, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call an endpoint of this target, counted as one of its calls in flight. Raises as `route` does."""
        key = key_of(target)
        if (load := self._find_load(target)) is not None:
            self._pick_count += 1
            load.last_pick = self._pick_count
            load.in_flight += 1
        call = asyncio.ensure_future(target.call(name, args, kwargs))
        self._calls_in_flight.setdefault(key, set()).add(call)
        failed: bool | None = None
        try:
            value = await call
            failed = False
            return value
        except TargetGoneError as error:
            self._on_gone(target, str(error))
            self.remove(target)
            raise self._make_lost_error(target, name, str(error)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if key not in self._loss_reasons or (task is not None and task.cancelling()):
                raise
            raise self._make_lost_error(target, name, self._loss_reasons[key]) from None
        except Exception:
            failed = True
            raise
        finally:
            self._on_call_done(key, call)
            # Only if it is still the record: a newer start has one of its own, and so has one that was out meanwhile.
            if load is not None and self._find_load(target) is load and self._record_call_end(load, failed):
                self._on_suspect(target)

    def _record_call_end(self, load: _TargetLoad, failed: bool | None) -> bool:
        """Record the end of a call, None for a cancelled one; returns whether the target becomes suspect now."""
        load.in_flight -= 1
        if failed is None:
            return False
        if not failed:
            load.failures = 0
            load.suspended_until = load.suspension_s = 0.0
            return False
        load.failures += 1
        now = time.monotonic()
        # Calls that were in flight at the time of the suspension add no new evidence.
        if load.failures < SUSPECT_AFTER or load.suspended_until > now:
            return False
        load.suspension_s = min(max(2 * load.suspension_s, MIN_SUSPENSION_S), MAX_SUSPENSION_S)
        load.suspended_until = now + load.suspension_s
        return True

    def _on_call_done(self, key: Key, call: asyncio.Future[Any]) -> None:
        self._calls_in_flight[key].discard(call)
        if not self._calls_in_flight[key]:
            del self._calls_in_flight[key]
            self._loss_reasons.pop(key, None)
            self._changed.set()

    def _make_lost_error(self, target: ReplicaTarget, name: str, reason: str) -> ReplicaLostError:
        return ReplicaLostError(
            f"replica {target.replica} of {self._service} was lost during {name}: {reason}"
        )


RETRY_INTERVAL_S = 5.0
"""How long to wait for an unavailable state before it is requested again."""


@dataclass(slots=True)
class Replay:
    """A fan-out to be repeated on replicas that start, with the values that these returned."""

    number: int
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    previous: "Replay | None"
    values: dict[int, Any] = field(default_factory=dict)


class Replays:
    """Keeps the last fan-out of each state; endpoints in a tuple define one state, and the last of any counts."""

    def __init__(self, names: Iterable[str | tuple[str, ...]]) -> None:
        states = [(name,) if isinstance(name, str) else name for name in names]
        self._states = {name: state for state in states for name in state}
        self._last: dict[tuple[str, ...], Replay] = {}
        self._number = 0
        self._changed = asyncio.Event()

    def record(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Replay | None:
        """Keep a fan-out that begins; None if the endpoint defines no state."""
        if (state := self._states.get(name)) is None:
            return None
        self._number += 1
        previous = self._last.get(state)
        if previous is not None:
            previous.previous = None  # one step back is enough
        replay = self._last[state] = Replay(self._number, name, args, kwargs, previous)
        self._notify()
        return replay

    def withdraw(self, replay: Replay) -> None:
        """Withdraw a fan-out that no replica accepted; the previous one counts again."""
        state = self._states[replay.name]
        if self._last.get(state) is replay:
            if replay.previous is None:
                del self._last[state]
            else:
                self._last[state] = replay.previous
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def catch_up(self, target: ReplicaTarget) -> None:
        """Replay the kept fan-outs on a starting target, in their order, until none is new.

        If a state is unavailable, waits for the next fan-out, by which another provider replaces one that is gone, or
        retries after `RETRY_INTERVAL_S`, since the provider may only have been unreachable. The caller bounds the wait.
        """
        replayed: dict[tuple[str, ...], Replay] = {}
        while unseen := sorted(
            (replay for state, replay in self._last.items() if replayed.get(state) is not replay),
            key=lambda replay: replay.number,
        ):
            replay, changed = unseen[0], self._changed
            try:
                replay.values[target.replica] = await target.call(replay.name, replay.args, replay.kwargs)
            except StateUnavailableError:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_INTERVAL_S):
                        await changed.wait()
            else:
                replayed[self._states[replay.name]] = replay
