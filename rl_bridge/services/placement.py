"""What replicas need, and where they run: which hosts they get, and which of their GPUs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_bridge.config.monarch import RestartPolicy, RoleConfig
from rl_bridge.errors import RoleError

HOST_AVOIDANCE_S = 60.0
"""How long a host is the last choice after a process on it fell silent."""


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


@dataclass(slots=True, frozen=True)
class ReplicaSlot:
    """The place of one replica: consecutive hosts, processes on each, and the GPUs of its pool on each, if any."""

    first: int
    hosts: int
    procs: int
    gpus: tuple[tuple[int, ...], ...]
    pool: str = ""

    def gpus_of(self, rank: int) -> tuple[int, ...]:
        """Return the GPUs of a rank on its host; ranks are numbered host by host."""
        if not self.gpus:
            return ()
        host_gpus, index = self.gpus[rank // self.procs], rank % self.procs
        per_proc = len(host_gpus) // self.procs
        return host_gpus[index * per_proc : (index + 1) * per_proc]


def order_for_placement(services: Mapping[str, ServiceOptions]) -> list[str]:
    """Return the order in which services that start together are placed.

    Replicas that need several GPUs on one host come before those that fit anywhere: the latter spread over all hosts,
    and would leave no host with enough free GPUs.
    """

    def gpu_need(name: str) -> tuple[int, int]:
        options = services[name]
        return options.gpus_per_host, options.hosts

    return sorted(services, key=gpu_need, reverse=True)


@dataclass(slots=True)
class _Host:
    """A host: the mesh to which it belongs, what is free on it, and whether replicas may be placed there."""

    mesh: int
    gpus: int
    joined: bool = False
    processes: int = 0
    avoided_until: float = 0.0
    closed: bool = False
    taken: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """GPUs in use, by pool."""

    def free_gpus(self, pool: str) -> list[int]:
        return [gpu for gpu in range(self.gpus) if gpu not in self.taken[pool]]


class NoRoomError(RoleError):
    """No host has room for a replica."""


class Placement:
    """Assigns hosts to replicas: those with the fewest processes first, those that fell silent last.

    Hosts without GPUs may follow those with GPUs. Replicas that need no GPU prefer these, and no replica spans hosts
    of both kinds, or one that has joined.
    """

    def __init__(self, hosts: int, gpus: int, cpu_hosts: int = 0) -> None:
        self._hosts = [_Host(0, gpus) for _ in range(hosts)] + [_Host(1, 0) for _ in range(cpu_hosts)]

    def add_host(self, gpus: int) -> int:
        """Add a host that joins, closed at first: nothing is placed there; returns its number."""
        number = len(self._hosts)
        self._hosts.append(_Host(2 + number, gpus, joined=True, closed=True))
        return number

    def set_closed(self, host: int, closed: bool) -> None:
        """Open a host to replicas, or close it."""
        self._hosts[host].closed = closed

    def room(self, host: int, options: ServiceOptions) -> int:
        """Return how many replicas a joined host has room for: as its free GPUs allow; one if they need none."""
        if options.hosts > 1:
            return 0
        needed = options.gpus_per_host
        return len(self._hosts[host].free_gpus(options.gpu_pool)) // needed if needed else 1

    def reserve(self, options: ServiceOptions, now: float, host: int | None = None) -> ReplicaSlot:
        """Reserve a slot for a replica, on `host` if that is given; `now` is a monotonic time in seconds.

        Raises:
            NoRoomError: There is no room.
        """
        needed, pool = options.gpus_per_host, options.gpu_pool

        def fits(span: Sequence[_Host]) -> bool:
            has_gpus = all(len(each.free_gpus(pool)) >= needed for each in span)
            return (
                has_gpus and len({each.mesh for each in span}) == 1 and not any(each.closed for each in span)
            )

        firsts = range(len(self._hosts) - options.hosts + 1) if host is None else [host]
        spans = {first: self._hosts[first : first + options.hosts] for first in firsts}
        fitting = {first: span for first, span in spans.items() if fits(span)}
        if not fitting:
            open_hosts = [each for each in self._hosts if not each.closed]
            raise NoRoomError(
                f"expected {options.hosts} host(s) in a row with {needed} free GPU(s) each for a replica, got "
                f"{len(open_hosts)} host(s) with {[len(each.free_gpus(pool)) for each in open_hosts]} free; give the "
                "roles fewer replicas or processes, the run more hosts, or have trainer and generators take turns "
                "(monarch.colocate=true)"
            )

        def placement_cost(first: int) -> tuple[int, bool, bool, int]:
            span = fitting[first]
            avoided = sum(each.avoided_until > now for each in span)
            wastes_gpus = not needed and (span[0].mesh == 0 or span[0].gpus > 0)
            return avoided, span[0].joined, wastes_gpus, sum(each.processes for each in span)

        first = min(fitting, key=placement_cost)
        span = fitting[first]
        gpus = tuple(tuple(each.free_gpus(pool)[:needed]) for each in span) if needed else ()
        for each in span:
            each.processes += options.procs
        for each, host_gpus in zip(span, gpus, strict=False):
            each.taken[pool].update(host_gpus)
        return ReplicaSlot(first, options.hosts, options.procs, gpus, pool)

    def _span(self, slot: ReplicaSlot) -> list[_Host]:
        return self._hosts[slot.first : slot.first + slot.hosts]

    def release(self, slot: ReplicaSlot) -> None:
        """Release a slot."""
        for host in self._span(slot):
            host.processes -= slot.procs
        for host, host_gpus in zip(self._span(slot), slot.gpus, strict=False):
            host.taken[slot.pool].difference_update(host_gpus)

    def avoid(self, slot: ReplicaSlot, now: float) -> None:
        """Prefer other hosts to a slot's for a while, because a process there fell silent."""
        for host in self._span(slot):
            host.avoided_until = now + HOST_AVOIDANCE_S
