"""The life of one replica: started, serving, lost, started again."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

from rl_bridge.errors import BridgeError, RoleError
from rl_bridge.services.balancer import TargetGoneError
from rl_bridge.services.options import Place, RestartBudget, ServiceOptions
from rl_bridge.services.processes import Incarnation, MeshTarget, close


class ReplicaState(StrEnum):
    """Where a replica is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    SUSPECT = "suspect"
    """It serves, but its calls keep failing: they go elsewhere where they can."""
    LOST = "lost"
    STOPPED = "stopped"
    FAILED = "failed"
    """It is beyond its restart budget."""


class ReplicaOwner(Protocol):
    """The service, as its keepers see it."""

    name: str

    async def catch_up(self, target: MeshTarget) -> None:
        """Bring a target to the state of the others, then let calls go to it: no fan-out comes between."""

    def left(self, target: MeshTarget, reason: str | None) -> None:
        """Calls no longer go to the target; for a reason where it was lost."""

    def beyond_budget(self, failure: RoleError) -> None:
        """A replica is lost for good."""

    def record(self, replica: int, what: str, detail: str = "") -> None:
        """Note what happened to a replica."""


class ReplicaKeeper:
    """Keeps one replica running.

    Args:
        replica: Its id.
        owner: The service.
        options: Of the service.
        endpoints: What the actor can be called for.
        start: Makes the processes of one start.
        actor: What to put into each of them.
        args: Of the actor's constructor.
    """

    def __init__(
        self,
        replica: int,
        owner: ReplicaOwner,
        options: ServiceOptions,
        endpoints: frozenset[str],
        start: Callable[[], Incarnation],
        actor: type[Any],
        args: tuple[Any, ...],
    ) -> None:
        self.replica = replica
        self.state = ReplicaState.STARTING
        self.restarts = 0
        self.places: tuple[Place, ...] = ()
        self.served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._options = options
        self._endpoints = endpoints
        self._start = start
        self._actor = actor
        self._args = args
        self._budget = RestartBudget(options.restarts)
        self._incarnation: Incarnation | None = None
        self._number = 0
        self._tail = ""
        self._leaving = asyncio.Event()

    def lose(self, number: int, reason: str) -> None:
        """Take a start of the replica for lost; a later one is not meant."""
        if self._incarnation is not None and number == self._number:
            self._mark_lost()
            self._incarnation.lose(reason)

    def leave(self) -> None:
        """Have `run` end in order."""
        self._leaving.set()

    async def run(self) -> None:
        """Start the replica, and again whenever it is lost, until its budget is gone or it is told to leave."""
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
        """Start once and serve; the reason of the loss, or None where that was the end."""
        if self._leaving.is_set():
            return None
        self._number += 1
        self.state = ReplicaState.STARTING
        self._owner.record(self.replica, "starting")
        try:
            incarnation = self._incarnation = self._start()
        except BridgeError as error:
            return self._begun_badly(error)
        target: MeshTarget | None = None
        vigil: asyncio.Task[None] | None = None
        try:
            target = MeshTarget(self.replica, self._number, incarnation.spawn(self._actor, self._args))
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
            self._owner.left(target, None)
            await close(target, self._endpoints)
            return None
        finally:
            if target is not None:
                self._owner.left(target, incarnation.lost.result() if incarnation.lost.done() else None)
            if incarnation.lost.done():
                self._mark_lost()
            if vigil is not None:
                vigil.cancel()
            await incarnation.stop()
            self.places = ()
            self._tail = incarnation.tail()

    def _mark_lost(self) -> None:
        """Show no process that is gone as one that is there: to end what is left of a start takes its time."""
        self.places = ()
        if self.state is not ReplicaState.FAILED:
            self.state = ReplicaState.LOST

    async def _begin(self, incarnation: Incarnation, target: MeshTarget) -> str | None:
        """Bring a new start to serve; the reason where it does not come to that."""
        beginning = asyncio.ensure_future(self._prepare(incarnation, target))
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await self._first_of(incarnation.lost, beginning)
            if not beginning.done():  # lost, or told to leave
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
        except TargetGoneError as gone:
            return str(gone)
        except BridgeError as error:
            return self._begun_badly(error)
        finally:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)

    def _begun_badly(self, error: BridgeError) -> str | None:
        if self.served.done():
            return f"it could not be started again: {error}"
        # It has never served, so it never will: what it was given is wrong.
        self._refuse(error)
        return None

    def _refuse(self, error: Exception) -> None:
        self.state = ReplicaState.FAILED
        self.served.set_exception(error)
        self._leaving.set()

    async def _prepare(self, incarnation: Incarnation, target: MeshTarget) -> None:
        self.places = tuple(await target.call_all("_place", (), {}))
        incarnation.follow(place.pid for place in self.places)
        if "setup" in self._endpoints:
            await target.call("setup", (), {})
        await self._owner.catch_up(target)

    async def _first_of(self, *futures: asyncio.Future[Any]) -> None:
        """Wait for one of these, or for being told to leave."""
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
    """Lose the start when one of its processes is gone or silent, whether or not it is called.

    Monarch reports a death by itself; of a host that cannot be reached only pending calls tell.
    """
    try:
        await target.call("_vigil", (), {})
    except (TargetGoneError, BridgeError) as error:
        incarnation.lose(str(error))
