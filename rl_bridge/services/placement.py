"""Where a process runs, and which hosts and GPUs a replica gets."""

from collections.abc import Mapping
from dataclasses import dataclass

from rl_bridge.errors import RoleError
from rl_bridge.services.options import ServiceOptions

HOST_AVOIDANCE_S = 60.0
"""How long a host is the last choice after something on it fell silent."""


@dataclass(slots=True, frozen=True)
class ReplicaSlot:
    """Room for one replica.

    Attributes:
        first: The first of its hosts; the others follow it.
        hosts: How many.
        procs: Processes on each of them.
        gpus: For each host the GPUs of its processes; empty for a replica without.
    """

    first: int
    hosts: int
    procs: int
    gpus: tuple[tuple[int, ...], ...]

    def gpu_of(self, rank: int) -> int | None:
        """The GPU of a rank on its host; ranks count through one host after the other."""
        return self.gpus[rank // self.procs][rank % self.procs] if self.gpus else None


def by_need(services: Mapping[str, ServiceOptions]) -> list[str]:
    """The order in which services that start together are to be given room.

    Replicas that need several GPUs on one host come before those that fit anywhere: these spread over all hosts, and
    would leave none with as many free.

    Args:
        services: By their names.
    """

    def need(name: str) -> tuple[int, int]:
        options = services[name]
        return options.procs if options.with_gpus else 0, options.hosts

    return sorted(services, key=need, reverse=True)


class Placement:
    """Shares hosts out among replicas: fewest processes first, hosts that fell silent last.

    Args:
        hosts: How many there are.
        gpus: GPUs on each.
        gpuless: Further hosts, behind those, without GPUs. Replicas that need none are put there first, and no replica
            spans hosts of both kinds.
    """

    def __init__(self, hosts: int, gpus: int, gpuless: int = 0) -> None:
        self._boundary = hosts
        self._processes = [0] * (hosts + gpuless)
        self._free = [set(range(gpus)) for _ in range(hosts)] + [set[int]() for _ in range(gpuless)]
        self._avoided_until = [0.0] * (hosts + gpuless)

    def take(self, options: ServiceOptions, now: float) -> ReplicaSlot:
        """Find room for a replica.

        Args:
            options: Its hosts, processes, and whether it needs GPUs.
            now: Seconds on any clock that only goes forward.

        Raises:
            RoleError: There is no room.
        """
        needed = options.procs if options.with_gpus else 0
        firsts = [
            first
            for first in range(len(self._processes) - options.hosts + 1)
            if all(len(free) >= needed for free in self._free[first : first + options.hosts])
            and not first < self._boundary < first + options.hosts
        ]
        if not firsts:
            raise RoleError(
                f"expected {options.hosts} host(s) in a row with {needed} free GPU(s) each for a replica, got "
                f"{len(self._processes)} host(s) with {[len(free) for free in self._free]} free; "
                "give the roles fewer replicas or processes, or the run more hosts"
            )

        def unwelcome(first: int) -> tuple[int, bool, int]:
            span = range(first, first + options.hosts)
            avoided = sum(self._avoided_until[host] > now for host in span)
            wasteful = not needed and first < self._boundary
            return avoided, wasteful, sum(self._processes[host] for host in span)

        first = min(firsts, key=unwelcome)
        gpus = tuple(tuple(sorted(self._free[host]))[:needed] for host in range(first, first + options.hosts))
        slot = ReplicaSlot(first, options.hosts, options.procs, gpus if needed else ())
        for host in range(first, first + options.hosts):
            self._processes[host] += options.procs
        for host, taken in enumerate(slot.gpus, first):
            self._free[host].difference_update(taken)
        return slot

    def release(self, slot: ReplicaSlot) -> None:
        """Give a slot's room back."""
        for host in range(slot.first, slot.first + slot.hosts):
            self._processes[host] -= slot.procs
        for host, taken in enumerate(slot.gpus, slot.first):
            self._free[host].update(taken)

    def avoid(self, slot: ReplicaSlot, now: float) -> None:
        """Something on a slot's hosts fell silent: for a while others are preferred."""
        for host in range(slot.first, slot.first + slot.hosts):
            self._avoided_until[host] = now + HOST_AVOIDANCE_S


@dataclass(slots=True, frozen=True)
class Place:
    """Where one rank of a replica runs."""

    host: str
    pid: int
