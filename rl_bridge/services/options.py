"""How a service is asked for: its size, its name, its environment, its restarts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_bridge.services.restarts import RestartPolicy


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
