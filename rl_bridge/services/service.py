"""Services: replicas of one actor that are kept running and called as one, and their status."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rl_bridge.errors import BridgeError, NoReplicaError, RoleError, StateUnavailableError
from rl_bridge.metrics.status import ReplicaRow
from rl_bridge.services.balancer import Balancer, Key, Replays, ReplicaTarget, TargetGoneError, key_of
from rl_bridge.services.handle import BalancedEndpoints, Fanout, Roster
from rl_bridge.services.placement import NoRoomError, RankProcess, ServiceOptions
from rl_bridge.services.processes import Incarnation, MeshTarget, close, endpoints_of
from rl_bridge.services.restarts import ReplicaState, RestartBudget

logger = logging.getLogger(__name__)


def report_errors(task: "asyncio.Task[Any]", on_error: Callable[[BaseException], object]) -> None:
    """Call `on_error` with the exception that a task ends with, if any; cancellation does not count."""

    def on_done(task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            on_error(error)

    task.add_done_callback(on_done)


HOST_LEFT = "its host has left the run"
"""The reason of a loss that does not count towards the restart budget."""
DRAIN_TIMEOUT_S = 15.0
"""How long a replica that leaves a run may take to hand back its work."""
LEAVE_TIMEOUT_S = 60.0
"""How long it may take until its processes have ended."""


class ReplicaSupervisor:
    """Starts one replica and restarts it whenever it is lost, within its budget.

    A replica of a host that has joined, `host`, stays there and ends with it.
    """

    def __init__(self, replica: int, owner: "Service", host: int | None = None) -> None:
        self.replica = replica
        self.host = host
        self.state = ReplicaState.STARTING
        self.restarts = 0
        self.processes: tuple[RankProcess, ...] = ()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: Exception | None = None
        """Why it will not be started again, if it has failed."""
        self._owner = owner
        self._options = owner.options
        self._budget = RestartBudget(owner.options.restarts)
        self._incarnation: Incarnation | None = None
        self._start_number = 0
        self._log_tail = ""
        self._stop_requested = asyncio.Event()
        self._leave_requested = asyncio.Event()
        self._start_over = asyncio.Event()

    @property
    def current_host(self) -> int | None:
        """The number of the host on which the replica runs, or ran last."""
        return self.host if self._incarnation is None else self._incarnation.host

    async def leave_host(self, *, notice: bool) -> None:
        """End the start on a host that leaves the run: with a notice, it hands back its work first.

        With a notice, returns when its processes have ended; without, they are gone. Bounded in time.
        """
        number = self._start_number
        if notice and self.state is ReplicaState.SERVING:
            self._leave_requested.set()
        else:
            self.lose(number, HOST_LEFT)
        if notice:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._start_over.wait()

    def lose(self, number: int, reason: str) -> None:
        """Mark a start of the replica as lost; does nothing if a later one has begun."""
        if self._incarnation is not None and number == self._start_number:
            self._mark_lost()
            self._incarnation.lose(reason)

    def request_stop(self) -> None:
        """Have `run` end the replica in order."""
        self._stop_requested.set()

    async def run(self) -> None:
        """Start the replica and restart it whenever it is lost, until its budget is exhausted or it is stopped."""
        try:
            while (reason := await self._run_once()) is not None:
                self._owner.record(self.replica, "left" if self._leave_requested.is_set() else "lost", reason)
                self.state = ReplicaState.LOST
                if reason == HOST_LEFT:  # nothing to count: the replica is not to blame
                    if self.host is not None:
                        return
                    continue
                backoff_s = self._budget.take_restart(time.monotonic())
                if backoff_s is None:
                    self._abort(reason)
                    return
                self._owner.record(self.replica, "restarting", f"in {backoff_s:g} s")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop_requested.wait(), backoff_s)
                self.restarts += 1
        except Exception as error:
            if self.ready.done():
                raise
            self._fail_first_start(error)
        finally:
            if self.state is not ReplicaState.FAILED:
                self.state = ReplicaState.STOPPED
            self._start_over.set()
            if not self.ready.done():
                self.ready.cancel()

    async def _run_once(self) -> str | None:
        """Start once and serve; returns the reason of the loss, or None if the replica ended for good."""
        if self._stop_requested.is_set():
            return None
        self._start_number += 1
        self._leave_requested.clear()
        self._start_over.clear()
        self.state = ReplicaState.STARTING
        self._owner.record(self.replica, "starting")
        try:
            incarnation = self._incarnation = self._owner.make_incarnation(self.replica, self.host)
        except NoRoomError as error:
            if self.host is not None or await self._wait_for_host():
                return HOST_LEFT
            return self._handle_start_error(error)
        except BridgeError as error:
            return self._handle_start_error(error)
        target: MeshTarget | None = None
        watchers = list[asyncio.Task[Any]]()
        try:
            ranks = incarnation.spawn(self._owner.actor, self._owner.args)
            target = MeshTarget(self.replica, self._start_number, ranks)
            # A call that never returns: Monarch's own reports of deaths tell no more, and an unreachable host shows
            # only in pending calls.
            watchers.append(asyncio.create_task(_watch(incarnation, target.call, "_wait_forever", (), {})))
            reason = await self._wait_ready(incarnation, target)
            if reason is not None or self._stop_requested.is_set():
                return reason
            self.state = ReplicaState.SERVING
            self._owner.record(self.replica, "serving")
            watchers.append(asyncio.create_task(_watch(incarnation, _require_answers, target)))
            if not self.ready.done():
                self.ready.set_result(None)
            leave = asyncio.create_task(self._leave_requested.wait())
            watchers.append(leave)
            await self._wait_for_any(incarnation.lost, leave)
            if incarnation.lost.done():
                return incarnation.lost.result()
            self._owner.end_start(target, None)
            if leave.done() and not await self._owner.drain(target):
                self._owner.end_start(target, HOST_LEFT)  # so that others repeat its calls
                return HOST_LEFT
            await close(target, self._owner.endpoints)
            return None if self._stop_requested.is_set() else HOST_LEFT
        finally:
            if target is not None:
                self._owner.end_start(target, incarnation.lost.result() if incarnation.lost.done() else None)
            if incarnation.lost.done():
                self._mark_lost()
            for watcher in watchers:
                watcher.cancel()
            await incarnation.stop()
            self.processes = ()
            self._start_over.set()
            self._log_tail = incarnation.tail()

    async def _wait_for_host(self) -> bool:
        """Wait for a host to join, if the run cannot go on without this replica; returns whether one has."""
        if not self.ready.done() or not self._owner.needs_host():
            return False
        joined = asyncio.ensure_future(self._owner.host_joined.wait())
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await self._wait_for_any(joined)
            return True
        except TimeoutError:
            return False
        finally:
            joined.cancel()

    def _mark_lost(self) -> None:
        """Update the status at once: ending the rest of a lost start takes a while."""
        self.processes = ()
        if self.state is not ReplicaState.FAILED:
            self.state = ReplicaState.LOST

    async def _wait_ready(self, incarnation: Incarnation, target: MeshTarget) -> str | None:
        """Prepare a new start for serving; returns the reason if it is lost before it serves."""
        preparation = asyncio.ensure_future(self._prepare(incarnation, target))
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await self._wait_for_any(incarnation.lost, preparation)
            if not preparation.done():  # it was lost, or is to stop
                return incarnation.lost.result() if incarnation.lost.done() else None
            preparation.result()
            return None
        except TimeoutError:
            return self._handle_start_error(
                RoleError(
                    f"replica {self.replica} of {self._owner.name} did not serve within "
                    f"{self._options.start_timeout_s:g} s; see its log, or give it longer (start_timeout_s)"
                )
            )
        except TargetGoneError as loss:
            return str(loss)
        except BridgeError as error:
            return self._handle_start_error(error)
        finally:
            preparation.cancel()
            await asyncio.gather(preparation, return_exceptions=True)

    def _handle_start_error(self, error: BridgeError) -> str | None:
        if self.ready.done():
            return f"it could not be restarted: {error}"
        # A replica that has never served is not retried: its arguments or options are wrong.
        self._fail_first_start(error)
        return None

    def _fail_first_start(self, error: Exception) -> None:
        self.state = ReplicaState.FAILED
        self.failure = error
        self._owner.record(self.replica, "failed", str(error))
        self._fail_ready(error)
        self._stop_requested.set()

    def _fail_ready(self, error: Exception) -> None:
        self.ready.set_exception(error)
        self.ready.exception()  # nobody waits for a replica that starts later

    async def _prepare(self, incarnation: Incarnation, target: MeshTarget) -> None:
        self.processes = tuple(await target.call_all("_locate", (), {}))
        incarnation.watch_pids(process.pid for process in self.processes)
        if "setup" in self._owner.endpoints:
            await target.call("setup", (), {})
        await self._owner.catch_up(target)

    async def _wait_for_any(self, *futures: asyncio.Future[Any]) -> None:
        """Wait for one of these, or for the stop request."""
        stop = asyncio.ensure_future(self._stop_requested.wait())
        try:
            await asyncio.wait({stop, *futures}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()

    def _abort(self, reason: str) -> None:
        self.state = ReplicaState.FAILED
        self._owner.record(self.replica, "failed", reason)
        policy = self._options.restarts
        description = (
            f"is lost, and it is never restarted: {reason}"
            if policy.budget == 0
            else f"was lost more than {policy.budget} times within {policy.window_s:g} s, at last: {reason}"
        )
        self.failure = RoleError(
            f"replica {self.replica} of {self._owner.name} {description}\n{self._log_tail}"
        )
        if not self.ready.done():
            self._fail_ready(self.failure)


async def _watch(incarnation: Incarnation, call: Callable[..., Awaitable[object]], *args: object) -> None:
    """Mark the start as lost when a call to its processes fails."""
    try:
        await call(*args)
    except (TargetGoneError, BridgeError) as error:
        incarnation.lose(str(error))


PING_INTERVAL_S = 10.0
PING_TIMEOUT_S = 30.0
MAX_MISSED_PINGS = 20
"""Pings in a row without an answer after which a replica counts as blocked for good: ten minutes."""


async def _require_answers(target: MeshTarget) -> None:
    """Ping a serving replica; raises TargetGoneError if it does not answer for long.

    A process whose event loop is blocked is alive to Monarch. Until it serves, it may be: a start has its own timeout.
    """
    missed = 0
    while missed < MAX_MISSED_PINGS:
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                await target.call("_locate", (), {})
            missed = 0
            await asyncio.sleep(PING_INTERVAL_S)
        except TimeoutError:  # a single one means nothing: this process may have been suspended
            missed += 1
    raise TargetGoneError(f"it is blocked: {missed} pings in a row got no answer in {PING_TIMEOUT_S:g} s")


HEALTH_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 40.0
MAX_ROSTER_LOSSES = 64


class Service(BalancedEndpoints):
    """Replicas of one actor. Made by `ServiceActor.options(...).as_service(...)`.

    Args:
        name: The service's name in errors, logs and events.
        actor: The actor's class, with `REPLAYED` and `REPEATABLE`.
        args: The arguments of its constructor.
        options: The service's options.
        start: Makes the processes of one start of a replica, given its id and, if it has to be there, a host's number.
        record: Records an event: replica, kind, and reason, if any.
        on_failure: Called when a replica has exhausted its budget and too few others are left, or a task of the service
            ends with an error.
        on_left: Called when a replica has ended with its host: another host may have room for one.
    """

    def __init__(
        self,
        name: str,
        actor: type[Any],
        args: tuple[Any, ...],
        options: ServiceOptions,
        *,
        start: Callable[[int, int | None], Incarnation],
        record: Callable[..., None],
        on_failure: Callable[[Exception], None],
        on_left: Callable[[], None],
    ) -> None:
        balancer = Balancer(
            name,
            actor.REPEATABLE,
            options.start_timeout_s,
            on_gone=self._mark_lost_replica,
            on_suspect=self._start_health_check,
        )
        super().__init__(balancer, endpoints_of(actor))
        self.name = name
        self.actor = actor
        self.args = args
        self.options = options
        self.make_incarnation = start
        self.record = record
        self._on_failure = on_failure
        self._on_left = on_left
        self._replays = Replays(actor.REPLAYED)
        self._supervisors: dict[int, ReplicaSupervisor] = {}
        self._supervisor_tasks: set[asyncio.Task[None]] = set()
        self._replica_ids = itertools.count()
        self._started = self._stopping = False
        self.host_joined = asyncio.Event()
        """Set when a host joins; each time anew."""
        self._checks: set[asyncio.Task[None]] = set()
        self._epoch = 0
        self._lost: deque[Key] = deque(maxlen=MAX_ROSTER_LOSSES)
        self._listeners: list[Callable[[Roster], None]] = []

    @property
    def replicas(self) -> list[ReplicaRow]:
        """The status of each replica, without its weights' version, which only the replica knows."""
        return [
            ReplicaRow(
                id=supervisor.replica,
                state=ReplicaState.SUSPECT
                if supervisor.state is ReplicaState.SERVING
                and self._balancer.is_suspended(supervisor.replica)
                else supervisor.state,
                host=supervisor.processes[0].host if supervisor.processes else None,
                pids=tuple(process.pid for process in supervisor.processes),
                in_flight=self._balancer.in_flight(supervisor.replica),
                restarts=supervisor.restarts,
            )
            for supervisor in self._supervisors.values()
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

    async def start(self) -> None:
        """Start the replicas; returns when all of them serve."""
        supervisors = [self._begin() for _ in range(self.options.num_replicas)]
        await asyncio.gather(*(supervisor.ready for supervisor in supervisors))
        for supervisor in supervisors:
            if supervisor.failure is not None:  # since it was ready
                raise supervisor.failure
        self._started = True

    def _begin(self, host: int | None = None) -> ReplicaSupervisor:
        supervisor = ReplicaSupervisor(next(self._replica_ids), self, host)
        self._supervisors[supervisor.replica] = supervisor
        task = asyncio.ensure_future(self._keep(supervisor))
        self._supervisor_tasks.add(task)
        task.add_done_callback(self._supervisor_tasks.discard)
        report_errors(task, self._on_task_error)
        return supervisor

    async def _keep(self, supervisor: ReplicaSupervisor) -> None:
        """Keep a replica running to its end; afterwards the service goes on without it, if enough others are left."""
        await supervisor.run()
        if self._stopping or not self._started:
            return
        others, failure = len(self._supervisors) - 1, supervisor.failure
        if failure is not None and others < self.options.num_replicas:
            self.mark_failed(failure)
            return
        del self._supervisors[supervisor.replica]
        if failure is not None:
            logger.warning("%s goes on with %d replica(s): %s", self.name, others, failure)
            return
        if others < self.options.num_replicas:
            self._begin()
        self._on_left()

    @property
    def _max_replicas(self) -> int:
        return self.options.max_replicas or self.options.num_replicas

    def needs_host(self) -> bool:
        """Whether the service may grow, and has no more replicas than it needs."""
        return len(self._supervisors) <= self.options.num_replicas < self._max_replicas

    def grow(self, host: int, room: int) -> None:
        """Start replicas on a host that has joined: as many as it has room for, up to `max_replicas` in all."""
        if self._stopping:
            return
        self.host_joined.set()
        self.host_joined = asyncio.Event()
        limit = self._max_replicas - len(self._supervisors)
        if not self.options.with_gpus:
            room -= sum(supervisor.host == host for supervisor in self._supervisors.values())
        for _ in range(min(room, limit)):
            self._begin(host)

    async def leave_host(self, host: int, *, notice: bool) -> None:
        """Have all replicas leave a host; see `ReplicaSupervisor.leave_host`. Bounded in time; raises nothing."""
        leaving = [each for each in self._supervisors.values() if each.current_host == host]
        await asyncio.gather(*(each.leave_host(notice=notice) for each in leaving), return_exceptions=True)

    async def stop(self) -> None:
        """End all replicas. Bounded in time; raises nothing."""
        self._stopping = True
        self._balancer.fail(RoleError(f"the service {self.name} has been stopped"))
        for check in self._checks:
            check.cancel()
        for supervisor in self._supervisors.values():
            supervisor.request_stop()
        if self._supervisor_tasks:
            _, pending = await asyncio.wait(set(self._supervisor_tasks), timeout=STOP_TIMEOUT_S)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        self._supervisors.clear()

    def _on_task_error(self, error: BaseException) -> None:
        """Fail the service because a supervisor or a check ended with an unexpected error."""
        failure = RoleError(
            f"a task that keeps the service {self.name} running ended with an error: {error!r}"
        )
        failure.__cause__ = error
        self.mark_failed(failure)

    # Called by the supervisors.

    async def catch_up(self, target: MeshTarget) -> None:
        """Replay earlier fan-outs on a starting replica, then let it serve."""
        await self._replays.catch_up(target)
        # There is no await since the last check for fan-outs: a later one finds it among the targets.
        self._balancer.add(target)
        self._notify()

    async def drain(self, target: MeshTarget) -> bool:
        """Have a replica, to which no call goes any more, hand back its work; returns whether it has.

        Bounded in time; raises nothing.
        """
        with contextlib.suppress(Exception):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                if "drain" in self.endpoints:
                    await target.call("drain", (), {})
                await self._balancer.wait_idle(target)
            return True
        return False

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

    def mark_failed(self, failure: Exception) -> None:
        """Fail all calls of the service: a replica is lost for good."""
        self._balancer.fail(failure)
        self._on_failure(failure)

    def _notify(self) -> None:
        self._epoch += 1
        roster = self.roster
        for listener in self._listeners:
            listener(roster)

    # Called by the balancer.

    def _mark_lost_replica(self, target: ReplicaTarget, reason: str) -> None:
        self._mark_gone(target, reason)
        supervisor = self._supervisors.get(target.replica)
        if supervisor is not None:
            supervisor.lose(target.incarnation, reason)

    def _start_health_check(self, target: ReplicaTarget) -> None:
        self.record(target.replica, "suspect", "its calls keep failing")
        check = asyncio.ensure_future(self._check(target))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)
        report_errors(check, self._on_task_error)

    async def _check(self, target: ReplicaTarget) -> None:
        """Check a suspect's health and mark it as lost if that fails; otherwise the balancer goes on avoiding it."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await target.call("health" if "health" in self.endpoints else "_locate", (), {})
        except (TargetGoneError, BridgeError, TimeoutError) as error:
            reason = "did not answer" if isinstance(error, TimeoutError) else str(error)
            self._mark_lost_replica(target, f"its calls keep failing, and so does its health check: {reason}")

    async def _fan_out(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, wait: bool = True
    ) -> Fanout:
        replay = self._replays.record(name, args, kwargs)
        if wait and replay is None and not self._balancer.targets:
            await self._balancer.wait_for_target()
        targets = self._balancer.targets
        replies = await asyncio.gather(
            *(self._balancer.call(target, name, args, kwargs) for target in targets), return_exceptions=True
        )
        values: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        refusals: list[tuple[ReplicaTarget, Exception]] = []
        for target, reply in zip(targets, replies, strict=True):
            if not isinstance(reply, BaseException):
                values[target.replica] = reply
            elif isinstance(reply, Exception):
                failed[target.replica] = reply
                if self._balancer.holds(target):  # its process is alive, so the endpoint itself raised
                    refusals.append((target, reply))
            else:
                raise reply
        first_refusal = refusals[0][1] if refusals else None
        if not (wait or values or first_refusal):
            return Fanout(values, failed)
        if replay is not None and not values:
            if first_refusal is None:
                # All targets were lost rather than refused it: the next replica to start gets it before it serves.
                await self._balancer.wait_for_target()
            values.update(replay.values)
            if not values:
                self._replays.withdraw(replay)
        if replay is not None:
            for target, refusal in refusals:
                # If no replica accepted it, not even a starting one, those that found it unavailable keep their state.
                if values or not isinstance(refusal, StateUnavailableError):
                    self._mark_lost_replica(target, f"{name} failed on it: {refusal}")
        if not values:
            superseded = NoReplicaError(
                f"{name} was superseded by a later fan-out before a replica of {self.name} took it"
            )
            raise first_refusal or next(iter(failed.values()), superseded)
        return Fanout(values, failed)
