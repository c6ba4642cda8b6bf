"""A service: replicas of one actor, kept running, called as one; and how they stand."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_bridge.background import tell_of_errors
from rl_bridge.errors import BridgeError, NoReplicaError, RoleError, StateUnavailableError
from rl_bridge.services.balancer import Balancer, Key, Replays, ReplicaTarget, TargetGoneError, key_of
from rl_bridge.services.handle import Fanout, Roster, Routed, StickySession
from rl_bridge.services.keeper import ReplicaKeeper, ReplicaState
from rl_bridge.services.options import Place, ServiceOptions
from rl_bridge.services.processes import Incarnation, MeshTarget, endpoints_of


@dataclass(slots=True, frozen=True)
class ReplicaStatus:
    """How one replica stands.

    Attributes:
        id: Its number in the service.
        state: Where it is in its life.
        places: Host and process of each rank, as soon as they have told; none of a start that is over.
        in_flight: Calls it has begun and not ended.
        restarts: How often it was started again.
    """

    id: int
    state: ReplicaState
    places: tuple[Place, ...]
    in_flight: int
    restarts: int

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each rank."""
        return tuple(place.pid for place in self.places)

    @property
    def host(self) -> str:
        """The host of the first rank; empty before it has told."""
        return self.places[0].host if self.places else ""


HEALTH_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 40.0
LOSSES_TOLD = 64


class Service(Routed):
    """Replicas of one actor. Made by `ServiceActor.options(...).as_service(...)`.

    Args:
        name: Names it in errors, logs and events.
        actor: The actor's class, with `REPLAYED` and `REPEATABLE`.
        args: Of its constructor.
        options: What the service consists of.
        start: Makes the processes of one start of a replica, given its id.
        record: Takes what happens: replica, what, detail.
        on_failure: Told once when a replica is beyond its budget, or the service's own work ends in an error.
    """

    def __init__(
        self,
        name: str,
        actor: type[Any],
        args: tuple[Any, ...],
        options: ServiceOptions,
        *,
        start: Callable[[int], Incarnation],
        record: Callable[[int, str, str], None],
        on_failure: Callable[[BridgeError], None],
    ) -> None:
        self.name = name
        self._actor = actor
        self._args = args
        self._options = options
        self._start = start
        self._record = record
        self._on_failure = on_failure
        self._endpoints = endpoints_of(actor)
        self._replays = Replays(actor.REPLAYED)
        self._keepers: dict[int, ReplicaKeeper] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._checks: set[asyncio.Task[None]] = set()
        self._epoch = 0
        self._lost: deque[Key] = deque(maxlen=LOSSES_TOLD)
        self._listeners: list[Callable[[Roster], None]] = []
        self._balancer = Balancer(
            name, actor.REPEATABLE, options.start_timeout_s, on_gone=self._lose, on_suspect=self._suspect
        )

    @property
    def endpoints(self) -> frozenset[str]:
        """The names that can be called."""
        return self._endpoints

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """How each replica stands."""
        return [
            ReplicaStatus(
                keeper.replica,
                ReplicaState.SUSPECT
                if keeper.state is ReplicaState.SERVING and self._balancer.is_suspended(keeper.replica)
                else keeper.state,
                keeper.places,
                self._balancer.in_flight(keeper.replica),
                keeper.restarts,
            )
            for keeper in self._keepers.values()
        ]

    @property
    def roster(self) -> Roster:
        """Who serves now, for other processes."""
        return Roster(
            self.name,
            self._epoch,
            self._endpoints,
            self._actor.REPEATABLE,
            self._options.start_timeout_s,
            self._balancer.targets,
            tuple(self._lost),
        )

    def on_roster(self, listener: Callable[[Roster], None]) -> None:
        """Call `listener` with every new roster from now on, in the event loop; it must not block."""
        self._listeners.append(listener)

    def session(self, *, near: StickySession | None = None, room: int = sys.maxsize) -> StickySession:
        """Calls that stay with one replica as long as it lives; see `StickySession`."""
        return StickySession(self._balancer, self._endpoints, self._actor.REPEATABLE, near=near, room=room)

    async def ask(self, name: str, *, timeout_s: float) -> dict[int, Any]:
        """Ask the replicas that serve for what an endpoint tells, beside their traffic.

        It is no sign of whether a replica does its work: loads and suspicions stay as they are.

        Args:
            name: The endpoint.
            timeout_s: How long each replica has to answer.

        Returns:
            What each replica answered, by its id; those that failed, were lost meanwhile, or did not answer in time are
            left out.
        """

        async def told(target: ReplicaTarget) -> Any:
            async with asyncio.timeout(timeout_s):
                return await target.call(name, (), {})

        targets = self._balancer.targets
        answers = await asyncio.gather(*map(told, targets), return_exceptions=True)
        return {
            target.replica: answer
            for target, answer in zip(targets, answers, strict=True)
            if not isinstance(answer, BaseException)
        }

    async def start(self) -> None:
        """Start the replicas; returns when all of them serve.

        Raises:
            BridgeError: One could not be started; the others are being ended.
        """
        keepers = [self._keep(replica) for replica in range(self._options.num_replicas)]
        await asyncio.gather(*(keeper.served for keeper in keepers))

    async def stop(self) -> None:
        """End all replicas. Bounded; raises nothing."""
        self._balancer.fail(RoleError(f"the service {self.name} has been stopped"))
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*(self._retire(replica) for replica in list(self._keepers)))

    def _keep(self, replica: int) -> ReplicaKeeper:
        keeper = ReplicaKeeper(
            replica,
            self,
            self._options,
            self._endpoints,
            lambda: self._start(replica),
            self._actor,
            self._args,
        )
        self._keepers[replica] = keeper
        task = asyncio.ensure_future(keeper.run())
        tell_of_errors(task, self._broke)
        self._tasks[replica] = task
        return keeper

    async def _retire(self, replica: int) -> None:
        keeper, task = self._keepers[replica], self._tasks[replica]
        keeper.leave()
        _, pending = await asyncio.wait({task}, timeout=STOP_TIMEOUT_S)
        for late in pending:
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
        del self._keepers[replica], self._tasks[replica]

    def _broke(self, error: BaseException) -> None:
        """A keeper or a check ended in an error of its own, which must not pass unseen."""
        failure = RoleError(f"what keeps the service {self.name} running ended in an error: {error!r}")
        failure.__cause__ = error
        self.beyond_budget(failure)

    # What the keepers call.

    async def catch_up(self, target: MeshTarget) -> None:
        """Give a starting replica what was fanned out before; then it serves."""
        await self._replays.catch_up(target)
        # Nothing has been awaited since the last look: a fan-out from now on finds it among the targets.
        self._balancer.add(target)
        self._changed()

    def left(self, target: MeshTarget, reason: str | None) -> None:
        """A replica's start is over; for a reason where it was lost."""
        if reason is None:
            self._remove(target)
        else:
            self._gone(target, reason)

    def _gone(self, target: ReplicaTarget, reason: str) -> None:
        if key_of(target) not in self._lost:
            self._lost.append(key_of(target))
            self._balancer.lose(key_of(target), reason)
            self._changed()

    def _remove(self, target: ReplicaTarget) -> None:
        if self._balancer.holds(target):
            self._balancer.remove(target)
            self._changed()

    def beyond_budget(self, failure: RoleError) -> None:
        """A replica is lost for good, and the service with it."""
        self._balancer.fail(failure)
        self._on_failure(failure)

    def record(self, replica: int, what: str, detail: str = "") -> None:
        """Note what happened to a replica."""
        self._record(replica, what, detail)

    def _changed(self) -> None:
        self._epoch += 1
        roster = self.roster
        for listener in self._listeners:
            listener(roster)

    # What calls show of the replicas.

    def _lose(self, target: ReplicaTarget, reason: str) -> None:
        self._gone(target, reason)
        keeper = self._keepers.get(target.replica)
        if keeper is not None:
            keeper.lose(target.incarnation, reason)

    def _suspect(self, target: ReplicaTarget) -> None:
        self.record(target.replica, "suspect", "its calls keep failing")
        check = asyncio.ensure_future(self._check(target))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)
        tell_of_errors(check, self._broke)

    async def _check(self, target: ReplicaTarget) -> None:
        """Ask a suspect for its health. One that cannot tell is left to the router, which avoids it."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await target.call("health" if "health" in self._endpoints else "_place", (), {})
        except (TargetGoneError, BridgeError, TimeoutError) as error:
            told = "did not answer" if isinstance(error, TimeoutError) else str(error)
            self._lose(target, f"its calls keep failing, and so does its health check: {told}")

    async def _route(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return await self._balancer.route(name, args, kwargs)

    async def _fan_out(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, wait: bool = True
    ) -> Fanout:
        replay = self._replays.keep(name, args, kwargs)
        if wait and replay is None and not self._balancer.targets:
            await self._balancer.any_target()
        targets = self._balancer.targets
        answers = await asyncio.gather(
            *(self._balancer.call(target, name, args, kwargs) for target in targets), return_exceptions=True
        )
        values: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        refusals: list[tuple[ReplicaTarget, Exception]] = []
        for target, answer in zip(targets, answers, strict=True):
            if not isinstance(answer, BaseException):
                values[target.replica] = answer
            elif isinstance(answer, Exception):
                failed[target.replica] = answer
                if self._balancer.holds(target):  # its process lives: it is the endpoint that raised
                    refusals.append((target, answer))
            else:
                raise answer
        refused = refusals[0][1] if refusals else None
        if not (wait or values or refused):
            return Fanout(values, failed)
        if replay is not None and not values:
            if refused is None:
                # Nobody refused it, they were lost: whoever starts next takes it before it serves.
                await self._balancer.any_target()
            values.update(replay.values)
            if not values:
                self._replays.withdraw(replay)
        if replay is not None:
            for target, refusal in refusals:
                # Where nobody took it, not even who starts, those who could not be given it are as before.
                if values or not isinstance(refusal, StateUnavailableError):
                    self._lose(target, f"{name} failed on it: {refusal}")
        if not values:
            nobody = NoReplicaError(
                f"{name} was superseded by a later fan-out before a replica of {self.name} took it"
            )
            raise refused or next(iter(failed.values()), nobody)
        return Fanout(values, failed)
