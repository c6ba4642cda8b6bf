"""The options of a service, the placement of replicas on hosts and GPUs, and their restart policy."""

import asyncio
import errno
import hashlib
import os
import socket
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from openenv_core.backoff import exponential_pause_s
from rl_bridge.config.monarch import RestartPolicy as RestartPolicy
from rl_bridge.config.monarch import RoleConfig
from rl_bridge.errors import RoleError


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


HOST_AVOIDANCE_S = 60.0
"""How long a host is the last choice after a process on it fell silent."""


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


@dataclass(slots=True, frozen=True)
class RankProcess:
    """The host and the process in which one rank of a replica runs."""

    host: str
    pid: int


START_VARIABLE = "ROPEWALK_START"
"""The variable that tells a process which start of which replica it belongs to; see `start_of`."""
FIRST_START = "0.0.0"
_SEED_BITS = 31  # every random number generator takes as many


def start_of(replica: int, rank: int, earlier_starts: int) -> str:
    """Return the value of `START_VARIABLE`: replica, rank, and the number of earlier starts."""
    return f"{replica}.{rank}.{earlier_starts}"


def shared_gpu_number() -> int:
    """Return the number that a trainer's rank shares with the generator with which it takes turns."""
    replica, rank, _ = os.environ.get(START_VARIABLE, FIRST_START).split(".")
    return int(replica) + int(rank)


RUN_VARIABLE = "ROPEWALK_RUN"
"""The variable that tells a process which run it belongs to: the fleet's name."""
GPU_LOCK_POLL_INTERVAL_S = 0.02


class GpuLock:
    """A lock on this process's GPU, for processes that take turns on it.

    It is held by binding an abstract Unix socket (unix(7)), which exists on this machine only and in no folder: the
    kernel releases it when its holder dies. Without GPUs, rank N of one service takes turns with replica N of the
    other, as if they shared a GPU.
    """

    def __init__(self) -> None:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES") or f"cpu-{shared_gpu_number()}"
        run = os.environ.get(RUN_VARIABLE, "")
        self._names = [f"\0ropewalk-turn/{run}/{device.strip()}" for device in devices.split(",")]
        self._sockets: list[socket.socket] = []
        self._acquiring = asyncio.Lock()
        self.held = False

    async def acquire(self, timeout_s: float) -> None:
        """Wait for the lock; returns at once if this process holds it."""
        async with self._acquiring:
            if not self.held:
                await self._acquire(timeout_s)

    async def _acquire(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not self._try_bind_all():  # noqa: ASYNC110 - the kernel tells nobody
                    await asyncio.sleep(GPU_LOCK_POLL_INTERVAL_S)
        except TimeoutError:
            raise RoleError(
                f"expected a turn on the GPU that trainer and generators share (monarch.colocate) within "
                f"{timeout_s:g} s, another process has it; see its log, or raise trainer.timeout_s"
            ) from None

    def _try_bind_all(self) -> bool:
        """Bind all names or none: the trainer's ranks have a GPU each, and the first to have it waits for the rest."""
        try:
            for name in self._names:
                self._sockets.append(socket.socket(socket.AF_UNIX))
                if not _try_bind(self._sockets[-1], name):
                    return False
            self.held = True
        finally:
            if not self.held:
                self.release()
        return True

    def release(self) -> None:
        """Release the lock."""
        sockets, self._sockets, self.held = self._sockets, [], False
        for sock in sockets:
            sock.close()


def _try_bind(sock: socket.socket, name: str) -> bool:
    try:
        sock.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def derive_seed(seed: int) -> int:
    """Derive this process's own seed from the run's.

    Replicas with the same seed would sample the same answers for siblings, which share a prompt and are spread over
    replicas; and a restarted replica would repeat its earlier samples. The first start of the first rank of replica 0
    and processes outside of services keep the run's seed.
    """
    start = os.environ.get(START_VARIABLE, FIRST_START)
    if start == FIRST_START:
        return seed
    digest = hashlib.sha256(f"{seed}/{start}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (1 << _SEED_BITS)
