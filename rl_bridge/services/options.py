"""How a service is asked for: its size, its name, its environment, its restarts."""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from rl_bridge.errors import RoleFailed
from rl_bridge.services.restarts import RestartPolicy

if TYPE_CHECKING:
    from rl_bridge.services.actor import ServiceActor
    from rl_bridge.services.service import Service


@dataclass(kw_only=True, slots=True, frozen=True)
class ServiceOptions:
    """What a service consists of.

    Attributes:
        procs: Processes of a replica on each of its hosts.
        hosts: Hosts of a replica.
        with_gpus: Each process gets one GPU of its host; without, none is visible to it.
        num_replicas: Replicas to begin with.
        name: Names the service, its processes and its logs; the actor's class otherwise.
        environment: Variables the processes start with, beside the controller's.
        restarts: What is done about lost replicas.
        start_timeout_s: Seconds a replica may take from its process to its first call; also how long a call
            waits while no replica serves.
    """

    procs: int = 1
    hosts: int = 1
    with_gpus: bool = False
    num_replicas: int = 1
    name: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: RestartPolicy = RestartPolicy()  # noqa: RUF009 - it is frozen
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for key in ("procs", "hosts", "num_replicas"):
            if getattr(self, key) < 1:
                raise ValueError(f"expected {key} to be at least 1, got {getattr(self, key)}")
        if self.start_timeout_s <= 0:
            raise ValueError(f"expected start_timeout_s to be more than 0 s, got {self.start_timeout_s:g}")


class Launcher(Protocol):
    """What starts services: the fleet."""

    async def launch(
        self, actor: "type[ServiceActor]", options: ServiceOptions, args: tuple[Any, ...]
    ) -> "Service":
        """Start a service and return it when all of its replicas serve."""


current_launcher: ContextVar[Launcher | None] = ContextVar("current_launcher", default=None)
"""The fleet that is open here."""


@dataclass(slots=True, frozen=True)
class BoundOptions:
    """An actor's class with the options of its service."""

    actor: "type[ServiceActor]"
    options: ServiceOptions

    async def as_service(self, *args: Any) -> "Service":
        """Start the replicas, each an actor made with `args`, and return when all of them serve.

        Raises:
            RoleFailed: No fleet is open, or a replica could not be started.
            BridgeError: What `setup` raised.
        """
        launcher = current_launcher.get()
        if launcher is None:
            raise RoleFailed(
                f"expected an open fleet to start {self.actor.__name__} in, there is none; "
                "write `async with Fleet(logs):` around it"
            )
        return await launcher.launch(self.actor, self.options, args)

    async def as_actor(self, *args: Any) -> "Service":
        """Start one replica that is never restarted: its loss ends the run. Raises as `as_service` does."""
        alone = replace(self.options, num_replicas=1, restarts=RestartPolicy(budget=0))
        return await BoundOptions(self.actor, alone).as_service(*args)
