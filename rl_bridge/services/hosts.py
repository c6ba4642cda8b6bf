"""Where the processes of a run can be: this machine, several by address, or what a scheduler gives."""

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_bridge.errors import MissingStack, RoleFailed
from rl_bridge.services.placement import Slot

try:
    from monarch.actor import attach_to_workers, enable_transport, this_host
except ModuleNotFoundError as missing:
    raise MissingStack("torchmonarch") from missing

ATTACH_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


class Hosts(ABC):
    """The hosts of a run; a fleet opens and closes them.

    Attributes:
        local: Their processes are processes of this machine.
    """

    local = False

    @staticmethod
    def this_machine(*, gpus: int | None = None) -> "Hosts":
        """This machine alone.

        Args:
            gpus: How many GPUs its processes share; by default those of CUDA_VISIBLE_DEVICES, or of the driver.
        """
        return _ThisMachine(gpus)

    @staticmethod
    def workers(addresses: Sequence[str], *, address: str, gpus_per_host: int = 0) -> "Hosts":
        """Machines on which `monarch.actor.run_worker_loop_forever(address=...)` runs.

        Monarch does not encrypt or authenticate what it sends: the network between the hosts must be private.

        Args:
            addresses: Of the workers, such as "tcp://10.0.0.2:29501".
            address: Where this process can be reached by them, such as "tcp://10.0.0.1:29501". A process has one
                for its whole life, chosen before its first use of Monarch.
            gpus_per_host: GPUs on each of them.
        """
        return _Workers(tuple(addresses), address, gpus_per_host)

    @staticmethod
    def from_job(job: Any, *, mesh: str, gpus_per_host: int = 0, address: str | None = None) -> "Hosts":
        """The hosts that one of Monarch's jobs provides: ProcessJob, SlurmJob, KubernetesJob.

        Opening them submits the job and waits for it; closing them ends it.

        Args:
            job: The job.
            mesh: The name of its mesh of hosts.
            gpus_per_host: GPUs on each of them.
            address: As of `workers`, where the job's transport needs one.
        """
        return _Job(job, mesh, gpus_per_host, address)

    @property
    @abstractmethod
    def count(self) -> int:
        """How many hosts there are, once open."""

    @property
    @abstractmethod
    def gpus(self) -> tuple[str, ...]:
        """What CUDA_VISIBLE_DEVICES calls the GPUs of each."""

    @abstractmethod
    async def open(self) -> None:
        """Reach the hosts.

        Raises:
            RoleFailed: They cannot be reached.
        """

    @abstractmethod
    def mesh_of(self, slot: Slot) -> Any:
        """Monarch's mesh of the slot's hosts."""

    @abstractmethod
    async def close(self) -> None:
        """End what is left on them, and give them back. Bounded; raises nothing."""


class _ThisMachine(Hosts):
    local = True

    def __init__(self, gpus: int | None) -> None:
        self._gpus = _visible_gpus() if gpus is None else _numbered(gpus)

    @property
    def count(self) -> int:
        return 1

    @property
    def gpus(self) -> tuple[str, ...]:
        return self._gpus

    async def open(self) -> None:
        """Nothing is to be reached."""

    def mesh_of(self, slot: Slot) -> Any:
        return this_host()

    async def close(self) -> None:
        """Nothing is to be given back."""


class _Remote(Hosts):
    """A mesh of hosts that is attached to."""

    def __init__(self, gpus_per_host: int, address: str | None) -> None:
        self._gpus = _numbered(gpus_per_host)
        self._address = address
        self._mesh: Any = None

    @property
    def count(self) -> int:
        return len(self._mesh)

    @property
    def gpus(self) -> tuple[str, ...]:
        return self._gpus

    async def open(self) -> None:
        if self._address is not None:
            enable_transport(self._address)
        try:
            self._mesh = self._attach()
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                await self._mesh.initialized
        except BaseException as error:
            await self.close()  # what was asked of a scheduler is not left to it
            if not isinstance(error, Exception):
                raise
            raise RoleFailed(
                f"expected to reach the hosts {self._named()} within {ATTACH_TIMEOUT_S:g} s, they did not answer: "
                f"{error or type(error).__name__}; is a Monarch worker running on each, and the port open?"
            ) from error

    def mesh_of(self, slot: Slot) -> Any:
        return self._mesh.slice(hosts=slice(slot.first, slot.first + slot.hosts))

    async def close(self) -> None:
        if self._mesh is not None:
            with contextlib.suppress(Exception):  # what cannot be reached ends its processes by itself
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._mesh.stop()
            self._mesh = None

    @abstractmethod
    def _attach(self) -> Any: ...

    @abstractmethod
    def _named(self) -> str: ...


class _Workers(_Remote):
    def __init__(self, addresses: tuple[str, ...], address: str, gpus_per_host: int) -> None:
        super().__init__(gpus_per_host, address)
        if not addresses:
            raise ValueError("expected the address of at least one worker, got none")
        self._addresses = addresses

    def _attach(self) -> Any:
        return attach_to_workers(name="hosts", ca="trust_all_connections", workers=list(self._addresses))

    def _named(self) -> str:
        return ", ".join(self._addresses)


class _Job(_Remote):
    def __init__(self, job: Any, mesh: str, gpus_per_host: int, address: str | None) -> None:
        super().__init__(gpus_per_host, address)
        self._job = job
        self._name = mesh

    def _attach(self) -> Any:
        # Not one that a run before has left in a file: this run ends what it has started.
        return getattr(self._job.state(cached_path=None), self._name)

    def _named(self) -> str:
        return f"{self._name!r} of {type(self._job).__name__}"

    async def close(self) -> None:
        await super().close()
        with contextlib.suppress(Exception):  # its hosts may be gone already
            self._job.kill()


def _visible_gpus() -> tuple[str, ...]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(name for name in given.split(",") if name)
    return _numbered(len(list(Path("/dev").glob("nvidia[0-9]*"))))


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))
