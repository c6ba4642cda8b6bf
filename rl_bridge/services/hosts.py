"""The hosts of a run: this machine, several by address, or those that a scheduler provides."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from rl_bridge.config.monarch import visible_gpus
from rl_bridge.errors import MissingDependencyError, RoleError
from rl_bridge.services.own_process import raise_on_signals
from rl_bridge.services.placement import ReplicaSlot

try:
    from monarch.actor import attach_to_workers, enable_transport, this_host
except ImportError as error:
    raise MissingDependencyError.of_import(error) from error

ATTACH_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


class Hosts:
    """The hosts of a run, which a fleet opens and closes; this base class stands for the local machine."""

    local = True
    """Whether their processes run on this machine; those of hosts that join do not."""

    def __init__(self, gpus: Sequence[str], address: str | None = None) -> None:
        self.gpus = tuple(gpus)
        self._address = address
        self._joined: dict[int, Any] = {}

    @staticmethod
    def this_machine(*, gpus: int | None = None, address: str | None = None) -> "Hosts":
        """This machine alone.

        Args:
            gpus: The number of its GPUs; by default those of CUDA_VISIBLE_DEVICES, or else of the driver.
            address: As for `workers`; needed if others join.
        """
        return Hosts(visible_gpus() if gpus is None else _device_indices(gpus), address)

    @staticmethod
    def workers(addresses: Sequence[str], *, address: str, gpus_per_host: int = 0) -> "Hosts":
        """Machines on which `monarch.actor.run_worker_loop_forever(address=...)` runs.

        Monarch does not encrypt or authenticate what it sends: the network between the hosts must be private.

        Args:
            addresses: The workers' addresses, such as "tcp://10.0.0.2:29501".
            address: The address at which they can reach this process, such as "tcp://10.0.0.1:29501". A process has one
                for its whole life, chosen before its first use of Monarch.
            gpus_per_host: The number of GPUs on each worker.
        """
        if not addresses:
            raise ValueError("expected the address of at least one worker, got none")

        def attach() -> tuple[Any, ...]:
            workers = list(addresses)
            return (attach_to_workers(name="hosts", ca="trust_all_connections", workers=workers),)

        return _RemoteHosts(attach, gpus_per_host, address, ", ".join(addresses))

    @staticmethod
    def from_job(
        job: Any,
        *,
        mesh: str,
        cpu_mesh: str | None = None,
        gpus_per_host: int = 0,
        address: str | None = None,
    ) -> "Hosts":
        """The hosts that a Monarch job provides: ProcessJob, SlurmJob, KubernetesJob.

        Opening them submits the job and waits for it as long as the job itself allows; closing them ends it. Existing
        pods that a KubernetesJob has merely found keep running and serve the next run.

        Args:
            job: The job.
            mesh: The name of its mesh of hosts.
            cpu_mesh: The name of a further mesh, of hosts without GPUs, for replicas that need none.
            gpus_per_host: The number of GPUs on each host of `mesh`.
            address: As for `workers`, if the job's transport needs one.
        """
        names = (mesh,) if cpu_mesh is None else (mesh, cpu_mesh)

        def attach() -> tuple[Any, ...]:
            # No cached job of an earlier run: this run ends the job, so it must be its own.
            with raise_on_signals():  # it waits for its hosts, perhaps for half an hour
                state = job.state(cached_path=None)
            return tuple(getattr(state, name) for name in names)

        description = f"{' and '.join(map(repr, names))} of {type(job).__name__}"
        return _RemoteHosts(attach, gpus_per_host, address, description, job=job)

    @property
    def count(self) -> int:
        """The number of hosts, once open."""
        return 1

    @property
    def cpu_hosts(self) -> int:
        """The number of hosts at the end of the order that are only for replicas without GPUs."""
        return 0

    def variables_of(self, gpus: Sequence[int], *, joined: bool = False) -> dict[str, str]:
        """Return the environment variables that restrict a process to some GPUs of its host, by index, or to none."""
        if not gpus or (self.local and not joined):
            return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[gpu] for gpu in gpus)}
        # Only the host itself knows the names of its GPUs; the process's shell picks them by index.
        fields = ",".join(str(gpu + 1) for gpu in gpus)  # as `cut` counts
        return {"ROPEWALK_GPU": ",".join(map(str, gpus)), "ROPEWALK_GPU_FIELDS": fields}

    async def open(self) -> None:
        """Connect to the hosts; raises RoleError if they cannot be reached."""
        if self._address is not None:
            enable_transport(self._address)

    async def attach(self, number: int, address: str) -> None:
        """Attach the worker of a host that joins, whose slots begin at `number`; RoleError if it cannot be reached."""
        try:
            mesh = attach_to_workers(name=f"joined{number}", ca="trust_all_connections", workers=[address])
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                await mesh.initialized
        except Exception as error:
            raise RoleError(
                f"expected to reach the worker {address}, got: {error or type(error).__name__}"
            ) from error
        self._joined[number] = mesh

    async def detach(self, number: int, *, reachable: bool) -> None:
        """Stop what runs on a host that has joined, if it can be reached. Bounded in time; raises nothing."""
        if (mesh := self._joined.pop(number, None)) is not None and reachable:
            await _stop(mesh)

    def is_local(self, slot: ReplicaSlot) -> bool:
        """Whether a slot is on this machine."""
        return self.local and slot.first < self.count

    def mesh_of(self, slot: ReplicaSlot) -> Any:
        """Return Monarch's mesh of the slot's hosts; raises RoleError if they have left."""
        if slot.first < self.count:
            return self._mesh_of_first_hosts(slot)
        if slot.first not in self._joined:
            raise RoleError("expected a host of the run, it has left")
        return self._joined[slot.first]

    def _mesh_of_first_hosts(self, slot: ReplicaSlot) -> Any:
        return this_host()

    async def close(self) -> None:
        """Stop all processes on the hosts and release these. Bounded in time; raises nothing."""
        await asyncio.gather(*(self.detach(number, reachable=True) for number in tuple(self._joined)))


class _RemoteHosts(Hosts):
    """Attached meshes of remote hosts, numbered one mesh after the other."""

    local = False

    def __init__(
        self,
        attach: Callable[[], tuple[Any, ...]],
        gpus_per_host: int,
        address: str | None,
        description: str,
        *,
        job: Any = None,
    ) -> None:
        super().__init__(_device_indices(gpus_per_host), address)
        self._attach = attach
        self._description = description
        self._job = job
        self._meshes: tuple[Any, ...] = ()

    @property
    def count(self) -> int:
        return sum(len(mesh) for mesh in self._meshes)

    @property
    def cpu_hosts(self) -> int:
        return sum(len(mesh) for mesh in self._meshes[1:])

    async def open(self) -> None:
        await super().open()
        try:
            self._meshes = self._attach()
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                for mesh in self._meshes:
                    await mesh.initialized
        except BaseException as error:
            await self.close()  # a submitted job must not be left with the scheduler
            if not isinstance(error, Exception):
                raise
            # A scheduler has its own deadlines and error messages.
            timed_out = isinstance(error, TimeoutError)
            reason = (
                f"none within {ATTACH_TIMEOUT_S:g} s" if timed_out else f"{error or type(error).__name__}"
            )
            raise RoleError(
                f"expected to reach the hosts {self._description}, got: {reason}; "
                "is a Monarch worker running on each, and the port open?"
            ) from error

    def _mesh_of_first_hosts(self, slot: ReplicaSlot) -> Any:
        first = slot.first
        for mesh in self._meshes:
            if first < len(mesh):
                return mesh.slice(hosts=slice(first, first + slot.hosts))
            first -= len(mesh)
        raise IndexError(f"expected a slot on the {self.count} host(s) that are open, got {slot}")

    async def close(self) -> None:
        meshes, self._meshes = self._meshes, ()
        try:
            await asyncio.gather(super().close(), *(_stop(mesh) for mesh in meshes))
        finally:
            if self._job is not None:
                with contextlib.suppress(Exception):  # its hosts may be gone already
                    self._job.kill()


async def _stop(mesh: Any) -> None:
    with contextlib.suppress(Exception):  # an unreachable host ends its processes by itself
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await mesh.stop()


def _device_indices(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))
