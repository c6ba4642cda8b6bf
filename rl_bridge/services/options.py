"""The options of a service, the states of its replicas, and the budget of their restarts."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from openenv_core.backoff import exponential_pause_s
from rl_bridge.config.monarch import RestartPolicy as RestartPolicy
from rl_bridge.config.monarch import RoleConfig


class ReplicaState(StrEnum):
    """The state of a replica, or of an environment's server."""

    STARTING = "starting"
    SERVING = "serving"
    SUSPECT = "suspect"
    """It serves, but its calls keep failing: they go to other replicas, if any."""
    LOST = "lost"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"
    """It has exhausted its restart budget, or its first start failed."""


class RestartBudget:
    """Counts the restarts of one replica against its policy."""

    def __init__(self, restarts: RestartPolicy) -> None:
        self._restarts = restarts
        self._restart_times: deque[float] = deque(maxlen=restarts.budget)

    def take_restart(self, now: float) -> float | None:
        """Take one restart from the budget: seconds to wait before it, or None if the budget is exhausted."""
        restarts = self._restarts
        while self._restart_times and now - self._restart_times[0] >= restarts.window_s:
            self._restart_times.popleft()
        if len(self._restart_times) >= restarts.budget:
            return None
        self._restart_times.append(now)
        return exponential_pause_s(len(self._restart_times), restarts.backoff_s, restarts.max_backoff_s)


@dataclass(kw_only=True, slots=True, frozen=True)
class ServiceOptions:
    """The options of a service.

    Attributes:
        procs: Processes of a replica on each of its hosts.
        hosts: Hosts of a replica.
        with_gpus: Whether each process gets GPUs of its host; otherwise it sees none.
        gpus_per_proc: The number of GPUs for each process.
        gpu_pool: A GPU belongs to one process of each pool; services of different pools take turns on it.
        num_replicas: The number of replicas with which the service starts and can go on.
        max_replicas: The number up to which hosts that join add replicas; `num_replicas` by default.
        name: The name of the service, its processes and its logs; by default that of the actor's class.
        environment: Environment variables of the processes, in addition to the controller's.
        restarts: How lost replicas are restarted.
        start_timeout_s: Seconds that a replica may take from its process's start to its first call; also how long a
            call waits while no replica serves.
    """

    procs: int = 1
    hosts: int = 1
    with_gpus: bool = False
    gpus_per_proc: int = 1
    gpu_pool: str = ""
    num_replicas: int = 1
    max_replicas: int | None = None
    name: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    start_timeout_s: float = 600.0

    @property
    def gpus_per_host(self) -> int:
        """The number of GPUs of a replica on each of its hosts."""
        return self.procs * self.gpus_per_proc if self.with_gpus else 0

    def __post_init__(self) -> None:
        for key in ("procs", "hosts", "num_replicas", "gpus_per_proc"):
            if getattr(self, key) < 1:
                raise ValueError(f"expected {key} to be at least 1, got {getattr(self, key)}")
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ValueError(
                f"expected max_replicas to be at least num_replicas, {self.num_replicas}, got {self.max_replicas}"
            )
        if self.start_timeout_s <= 0:
            raise ValueError(f"expected start_timeout_s to be more than 0 s, got {self.start_timeout_s:g}")


def options_of(role: RoleConfig) -> dict[str, Any]:
    """Return the fields of `ServiceOptions` that a row of the role table sets."""
    return {
        "procs": role.procs,
        "hosts": role.hosts,
        "with_gpus": role.gpus > 0,
        "gpus_per_proc": max(1, role.gpus // (role.procs * role.hosts)),
        "num_replicas": role.min_replicas,
        "max_replicas": role.max_replicas,
    }


@dataclass(slots=True, frozen=True)
class RankProcess:
    """The host and the process in which one rank of a replica runs."""

    host: str
    pid: int
