"""The base of the bridge's actors."""

import asyncio
import os
import socket
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rl_bridge.errors import MissingDependencyError, RoleError
from rl_bridge.metrics.spans import PROCESS_SPANS, SpanTotals
from rl_bridge.services.placement import RankProcess, ServiceOptions
from rl_bridge.services.restarts import RestartPolicy
from rl_bridge.services.service import Service

try:
    from monarch.actor import Actor, concurrent_endpoint
except ImportError as error:
    raise MissingDependencyError.of_import(error) from error


current_fleet: ContextVar[Any] = ContextVar("current_fleet", default=None)
"""The `Fleet` that is open in this context."""


@dataclass(slots=True, frozen=True)
class BoundOptions:
    """An actor class with the options of its service."""

    actor: "type[ServiceActor]"
    options: ServiceOptions

    async def as_service(self, *args: Any) -> Service:
        """Start the replicas, each an actor made with `args`; returns when all serve, raises what `setup` raises."""
        fleet = current_fleet.get()
        if fleet is None:
            raise RoleError(
                f"expected an open fleet to start {self.actor.__name__} in, there is none; "
                "write `async with Fleet(logs):` around it"
            )
        service: Service = await fleet.launch(self.actor, self.options, args)
        return service

    async def as_actor(self, *args: Any) -> Service:
        """Start one replica that is never restarted: its loss ends the run. Raises as `as_service` does."""
        options = replace(self.options, num_replicas=1, restarts=RestartPolicy(budget=0))
        return await BoundOptions(self.actor, options).as_service(*args)


class ServiceActor(Actor):
    """An actor that can be a service: replicas, routing, restarts.

    All endpoints are `async def`. While an `@endpoint` runs, the actor answers no other call, not even of a
    `@concurrent_endpoint`; after ten minutes without an answer a serving replica counts as lost. The constructor only
    stores its arguments: anything slow or fallible belongs in `setup`.

    A call is sent to each process of a replica separately: a process's rank is
    `monarch.actor.context().actor_instance.rank`, not `current_rank()`, which is the message's.

    A subclass may have these endpoints, which the service calls itself:

    - `setup(self) -> None`: after the process has started, before it serves.
    - `health(self) -> None`: raises if the replica cannot do its work; called when its calls keep failing.
    - `drain(self) -> None`: before its host leaves a run that goes on: hands back what it works on.
    - `close(self) -> None`: before an orderly stop.

    Attributes:
        REPLAYED: Endpoints whose fan-outs define the replicas' state. A starting replica gets the last fan-out of each
            before it serves. Endpoints in a tuple define one state: the replica gets the last fan-out of any of them.
        REPEATABLE: Endpoints that may be executed twice: `route` retries them on another replica if one is lost.
    """

    REPLAYED: ClassVar[tuple[str | tuple[str, ...], ...]] = ()
    REPEATABLE: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def options(cls, **options: Any) -> BoundOptions:
        """Set the options of a service of this actor; the keys are those of `ServiceOptions`."""
        return BoundOptions(cls, ServiceOptions(**options))

    @classmethod
    async def as_service(cls, *args: Any) -> Service:
        """Start a service with the default options; see `BoundOptions.as_service`."""
        return await cls.options().as_service(*args)

    @classmethod
    async def as_actor(cls, *args: Any) -> Service:
        """Start one replica whose loss is final; see `BoundOptions.as_actor`."""
        return await cls.options().as_actor(*args)

    @concurrent_endpoint
    async def spans(self) -> SpanTotals:
        """Return how the process has spent its time since it started."""
        return PROCESS_SPANS.totals()

    @concurrent_endpoint
    async def _wait_forever(self) -> None:
        """Never return: the call fails when the process is gone or silent."""
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def _locate(self) -> RankProcess:
        return RankProcess(socket.gethostname(), os.getpid())
