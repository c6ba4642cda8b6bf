"""Services: replicas of one actor that are kept running and called as one, and their status."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from rl_bridge.errors import BridgeError, NoReplicaError, RoleError, StateUnavailableError
from rl_bridge.metrics.status import ReplicaRow
from rl_bridge.services.balancer import Balancer, Key, Replays, ReplicaTarget, TargetGoneError, key_of
from rl_bridge.services.handle import Balanced, Fanout, Roster
from rl_bridge.services.options import Place, RestartBudget, ServiceOptions
from rl_bridge.services.processes import Incarnation, MeshTarget, close, endpoints_of


def tell_of_errors(task: "asyncio.Task[Any]", failed: Callable[[BaseException], object]) -> None:
    """Call `failed` with the exception that a task ends with, if any; cancellation does not count."""

    def on_done(task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(error)

    task.add_done_callback(on_done)


class ReplicaState(StrEnum):
    """The state of a replica."""

    STARTING = "starting"
    SERVING = "serving"
    SUSPECT = "suspect"
    """It serves, but its calls keep failing: they go to other replicas, if any."""
    LOST = "lost"
    STOPPED = "stopped"
    FAILED = "failed"
    """It has exhausted its restart budget, or its first start failed."""


class ReplicaKeeper:
    """Starts one replica and restarts it whenever it is lost, within its budget."""

    def __init__(self, replica: int, owner: "Service") -> None:
        self.replica = replica
        self.state = ReplicaState.STARTING
        self.restarts = 0
        self.places: tuple[Place, ...] = ()
        self.served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._options = owner.options
        self._budget = RestartBudget(owner.options.restarts)
        self._incarnation: Incarnation | None = None
        self._number = 0
        self._tail = ""
        self._leaving = asyncio.Event()

    def lose(self, number: int, reason: str) -> None:
        """Mark a start of the replica as lost; does nothing if a later one has begun."""
        if self._incarnation is not None and number == self._number:
            self._mark_lost()
            self._incarnation.lose(reason)

    def leave(self) -> None:
        """Have `run` end the replica in order."""
        self._leaving.set()

    async def run(self) -> None:
        """Start the replica and restart it whenever it is lost, until its budget is exhausted or it is stopped."""
        try:
            while (reason := await self._live()) is not None:
                self._owner.record(self.replica, "lost", reason)
                self.state = ReplicaState.LOST
                pause = self._budget.spend(time.monotonic())
                if pause is None:
                    self._abort(reason)
                    return
                self._owner.record(self.replica, "restarting", f"in {pause:g} s")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._leaving.wait(), pause)
                self.restarts += 1
        except Exception as error:
            if self.served.done():
                raise
            self._refuse(error)
        finally:
            if self.state is not ReplicaState.FAILED:
                self.state = ReplicaState.STOPPED
            if not self.served.done():
                self.served.cancel()

    async def _live(self) -> str | None:
        """Start once and serve; returns the reason of the loss, or None if the replica ended for good."""
        if self._leaving.is_set():
            return None
        self._number += 1
        self.state = ReplicaState.STARTING
        self._owner.record(self.replica, "starting")
        try:
            incarnation = self._incarnation = self._owner.make(self.replica)
        except BridgeError as error:
            return self._begun_badly(error)
        target: MeshTarget | None = None
        vigil: asyncio.Task[None] | None = None
        try:
            ranks = incarnation.spawn(self._owner.actor, self._owner.args)
            target = MeshTarget(self.replica, self._number, ranks)
            vigil = asyncio.ensure_future(_watch(incarnation, target))
            reason = await self._begin(incarnation, target)
            if reason is not None or self._leaving.is_set():
                return reason
            self.state = ReplicaState.SERVING
            self._owner.record(self.replica, "serving")
            if not self.served.done():
                self.served.set_result(None)
            await self._first_of(incarnation.lost)
            if incarnation.lost.done():
                return incarnation.lost.result()
            self._owner.end_start(target, None)
            await close(target, self._owner.endpoints)
            return None
        finally:
            if target is not None:
                self._owner.end_start(target, incarnation.lost.result() if incarnation.lost.done() else None)
            if incarnation.lost.done():
                self._mark_lost()
            if vigil is not None:
                vigil.cancel()
            await incarnation.stop()
            self.places = ()
            self._tail = incarnation.tail()

    def _mark_lost(self) -> None:
        """Update the status at once: ending the rest of a lost start takes a while."""
        self.places = ()
        if self.state is not ReplicaState.FAILED:
            self.state = ReplicaState.LOST

    async def _begin(self, incarnation: Incarnation, target: MeshTarget) -> str | None:
        """Prepare a new start for serving; returns the reason if it is lost before it serves."""
        beginning = asyncio.ensure_future(self._prepare(incarnation, target))
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await self._first_of(incarnation.lost, beginning)
            if not beginning.done():  # it was lost, or is to stop
                return incarnation.lost.result() if incarnation.lost.done() else None
            beginning.result()
            return None
        except TimeoutError:
            return self._begun_badly(
                RoleError(
                    f"replica {self.replica} of {self._owner.name} did not serve within "
                    f"{self._options.start_timeout_s:g} s; see its log, or give it longer (start_timeout_s)"
                )
            )
        except TargetGoneError as loss:
            return str(loss)
        except BridgeError as error:
            return self._begun_badly(error)
        finally:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)

    def _begun_badly(self, error: BridgeError) -> str | None:
        if self.served.done():
            return f"it could not be restarted: {error}"
        # A replica that has never served is not retried: its arguments or options are wrong.
        self._refuse(error)
        return None

    def _refuse(self, error: Exception) -> None:
        self.state = ReplicaState.FAILED
        self.served.set_exception(error)
        self._leaving.set()

    async def _prepare(self, incarnation: Incarnation, target: MeshTarget) -> None:
        self.places = tuple(await target.call_all("_place", (), {}))
        incarnation.follow(place.pid for place in self.places)
        if "setup" in self._owner.endpoints:
            await target.call("setup", (), {})
        await self._owner.catch_up(target)

    async def _first_of(self, *futures: asyncio.Future[Any]) -> None:
        """Wait for one of these, or for the stop request."""
        leaving = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait({leaving, *futures}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()

    def _abort(self, reason: str) -> None:
        self.state = ReplicaState.FAILED
        self._owner.record(self.replica, "failed", reason)
        policy = self._options.restarts
        losses = (
            f"is lost, and it is never restarted: {reason}"
            if policy.budget == 0
            else f"was lost more than {policy.budget} times within {policy.window_s:g} s, at last: {reason}"
        )
        failure = RoleError(f"replica {self.replica} of {self._owner.name} {losses}\n{self._tail}")
        if not self.served.done():
            self.served.set_exception(failure)
        self._owner.beyond_budget(failure)


async def _watch(incarnation: Incarnation, target: MeshTarget) -> None:
    """Mark the start as lost when one of its processes is gone or silent, by means of a call that never returns.

    Monarch reports a death itself, but an unreachable host shows only in pending calls.
    """
    try:
        await target.call("_vigil", (), {})
    except (TargetGoneError, BridgeError) as error:
        incarnation.lose(str(error))


HEALTH_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 40.0
LOSSES_TOLD = 64


class Service(Balanced):
    """Replicas of one actor. Made by `ServiceActor.options(...).as_service(...)`.

    Args:
        name: The service's name in errors, logs and events.
        actor: The actor's class, with `REPLAYED` and `REPEATABLE`.
        args: The arguments of its constructor.
        options: The service's options.
        start: Makes the processes of one start of a replica, given its id.
        record: Records an event: replica, kind, and reason, if any.
        on_failure: Called when a replica has exhausted its budget, or a task of the service ends with an error.
    """

    def __init__(
        self,
        name: str,
        actor: type[Any],
        args: tuple[Any, ...],
        options: ServiceOptions,
        *,
        start: Callable[[int], Incarnation],
        record: Callable[..., None],
        on_failure: Callable[[BridgeError], None],
    ) -> None:
        balancer = Balancer(
            name, actor.REPEATABLE, options.start_timeout_s, on_gone=self._lose, on_suspect=self._suspect
        )
        super().__init__(balancer, endpoints_of(actor))
        self.name = name
        self.actor = actor
        self.args = args
        self.options = options
        self.make = start
        self.record = record
        self._on_failure = on_failure
        self._replays = Replays(actor.REPLAYED)
        self._keepers: dict[int, ReplicaKeeper] = {}
        self._running: list[asyncio.Task[None]] = []
        self._checks: set[asyncio.Task[None]] = set()
        self._epoch = 0
        self._lost: deque[Key] = deque(maxlen=LOSSES_TOLD)
        self._listeners: list[Callable[[Roster], None]] = []

    @property
    def replicas(self) -> list[ReplicaRow]:
        """The status of each replica, without its weights' version, which only the replica knows."""
        return [
            ReplicaRow(
                id=keeper.replica,
                state=ReplicaState.SUSPECT
                if keeper.state is ReplicaState.SERVING and self._balancer.is_suspended(keeper.replica)
                else keeper.state,
                host=keeper.places[0].host if keeper.places else None,
                pids=tuple(place.pid for place in keeper.places),
                in_flight=self._balancer.in_flight(keeper.replica),
                restarts=keeper.restarts,
            )
            for keeper in self._keepers.values()
        ]

    @property
    def roster(self) -> Roster:
        """The replicas that serve now, for other processes."""
        return Roster(
            self.name,
            self._epoch,
            self.endpoints,
            self._balancer.repeatable,
            self.options.start_timeout_s,
            self._balancer.targets,
            tuple(self._lost),
        )

    def on_roster(self, listener: Callable[[Roster], None]) -> None:
        """Call `listener` with every new roster from now on, on the event loop; it must not block."""
        self._listeners.append(listener)

    async def ask(self, name: str, *, timeout_s: float) -> dict[int, Any]:
        """Call an endpoint of all serving replicas outside of the balancing; returns answers by replica.

        These calls do not count towards a replica's load or failures. Replicas that failed, were lost meanwhile, or did
        not answer in time are left out.
        """

        async def call_replica(target: ReplicaTarget) -> Any:
            async with asyncio.timeout(timeout_s):
                return await target.call(name, (), {})

        targets = self._balancer.targets
        answers = await asyncio.gather(*map(call_replica, targets), return_exceptions=True)
        return {
            target.replica: answer
            for target, answer in zip(targets, answers, strict=True)
            if not isinstance(answer, BaseException)
        }

    async def start(self) -> None:
        """Start the replicas; returns when all of them serve."""
        for replica in range(self.options.num_replicas):
            keeper = self._keepers[replica] = ReplicaKeeper(replica, self)
            self._running.append(asyncio.ensure_future(keeper.run()))
            tell_of_errors(self._running[-1], self._broke)
        await asyncio.gather(*(keeper.served for keeper in self._keepers.values()))

    async def stop(self) -> None:
        """End all replicas. Bounded in time; raises nothing."""
        self._balancer.fail(RoleError(f"the service {self.name} has been stopped"))
        for check in self._checks:
            check.cancel()
        for keeper in self._keepers.values():
            keeper.leave()
        if self._running:
            _, pending = await asyncio.wait(self._running, timeout=STOP_TIMEOUT_S)
            for late in pending:
                late.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        self._keepers.clear()

    def _broke(self, error: BaseException) -> None:
        """Fail the service because a keeper or a check ended with an unexpected error."""
        failure = RoleError(
            f"a task that keeps the service {self.name} running ended with an error: {error!r}"
        )
        failure.__cause__ = error
        self.beyond_budget(failure)

    # Called by the keepers.

    async def catch_up(self, target: MeshTarget) -> None:
        """Replay earlier fan-outs on a starting replica, then let it serve."""
        await self._replays.catch_up(target)
        # There is no await since the last check for fan-outs: a later one finds it among the targets.
        self._balancer.add(target)
        self._notify()

    def end_start(self, target: MeshTarget, reason: str | None) -> None:
        """Record that a replica's start is over; `reason` says why if it was lost."""
        if reason is not None:
            self._mark_gone(target, reason)
        elif self._balancer.holds(target):
            self._balancer.remove(target)
            self._notify()

    def _mark_gone(self, target: ReplicaTarget, reason: str) -> None:
        if key_of(target) not in self._lost:
            self._lost.append(key_of(target))
            self._balancer.lose(key_of(target), reason)
            self._notify()

    def beyond_budget(self, failure: RoleError) -> None:
        """Fail the service: a replica is lost for good."""
        self._balancer.fail(failure)
        self._on_failure(failure)

    def _notify(self) -> None:
        self._epoch += 1
        roster = self.roster
        for listener in self._listeners:
            listener(roster)

    # Called by the balancer.

    def _lose(self, target: ReplicaTarget, reason: str) -> None:
        self._mark_gone(target, reason)
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
        """Check a suspect's health and mark it as lost if that fails; otherwise the balancer goes on avoiding it."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await target.call("health" if "health" in self.endpoints else "_place", (), {})
        except (TargetGoneError, BridgeError, TimeoutError) as error:
            reason = "did not answer" if isinstance(error, TimeoutError) else str(error)
            self._lose(target, f"its calls keep failing, and so does its health check: {reason}")

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
                if self._balancer.holds(target):  # its process is alive, so the endpoint itself raised
                    refusals.append((target, answer))
            else:
                raise answer
        refused = refusals[0][1] if refusals else None
        if not (wait or values or refused):
            return Fanout(values, failed)
        if replay is not None and not values:
            if refused is None:
                # All targets were lost rather than refused it: the next replica to start gets it before it serves.
                await self._balancer.any_target()
            values.update(replay.values)
            if not values:
                self._replays.withdraw(replay)
        if replay is not None:
            for target, refusal in refusals:
                # If no replica accepted it, not even a starting one, those that found it unavailable keep their state.
                if values or not isinstance(refusal, StateUnavailableError):
                    self._lose(target, f"{name} failed on it: {refusal}")
        if not values:
            nobody = NoReplicaError(
                f"{name} was superseded by a later fan-out before a replica of {self.name} took it"
            )
            raise refused or next(iter(failed.values()), nobody)
        return Fanout(values, failed)
