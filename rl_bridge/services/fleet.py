"""The fleet of a run: it starts the services and stops all of their processes at the end."""

import asyncio
import re
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rl_bridge.errors import ReplicaLostError, RoleError
from rl_bridge.services.actor import ServiceActor, current_fleet
from rl_bridge.services.hosts import Hosts
from rl_bridge.services.own_process import RUN_VARIABLE, START_VARIABLE, shut_down_at_exit, start_of
from rl_bridge.services.placement import Placement, ServiceOptions
from rl_bridge.services.processes import PROCESS_ENDED, Incarnation, make_mark, rotate_logs, supervise
from rl_bridge.services.service import Service, report_errors

T = TypeVar("T")


REPORT_TIMEOUT_S = 5.0
MAX_EVENTS = 2000
LOG_CHECK_INTERVAL_S = 10.0
HOSTS = "hosts"


@dataclass(slots=True, frozen=True)
class FleetEvent:
    """An event of a replica, or of a host that joins: `service` is `HOSTS` then, and `replica` the host's number.

    `kind` is starting, serving, suspect, left, lost, restarting or failed, that of a host joined, leaving or lost;
    `detail` the reason, if any; `at` Unix time.
    """

    at: float
    service: str
    replica: int
    kind: str
    detail: str


class Fleet:
    """Owns the services of a run: starts, watches and stops them. An asynchronous context manager.

    `as_service` starts services in the fleet that is open.

    Args:
        logs: Folder for one log file per process, of about 16 MiB; the 16 MiB before are in `NAME.log.1`.
        hosts: The hosts on which processes run; this machine by default.
        heartbeat_s: Seconds between two liveness checks of processes: how soon a death is noticed.

    Attributes:
        events: The replicas' latest events, oldest first.
    """

    def __init__(self, logs: Path, *, hosts: Hosts | None = None, heartbeat_s: float = 1.0) -> None:
        if heartbeat_s <= 0:
            raise ValueError(f"expected heartbeat_s to be more than 0 s, got {heartbeat_s:g}")
        self.events: deque[FleetEvent] = deque(maxlen=MAX_EVENTS)
        self._logs = logs
        self._hosts = hosts or Hosts.this_machine()
        self._heartbeat_s = heartbeat_s
        self._services: dict[str, Service] = {}
        self._joined: list[int] = []
        self._start_counts: Counter[str] = Counter()
        self._name = make_mark()
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._outer_fleet: Any = None

    @property
    def services(self) -> dict[str, Service]:
        """The services by their names."""
        return dict(self._services)

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        # vLLM and others leave temporary files behind; in one folder they can be removed together. Made before the
        # hosts are open: a failure afterwards would leave a job with its scheduler.
        try:
            self._scratch = Path(tempfile.mkdtemp(prefix="ropewalk-"))
        except OSError as error:
            raise RoleError(
                f"expected room for temporary files, got: {error}; make room there, or have TMPDIR name another folder"
            ) from error
        try:
            await self._hosts.open()
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        cpu_hosts = self._hosts.cpu_hosts
        self._placement = Placement(self._hosts.count - cpu_hosts, len(self._hosts.gpus), cpu_hosts)
        supervise(self._heartbeat_s)
        self._log_rotation = asyncio.create_task(self._rotate_logs())
        report_errors(self._log_rotation, self.fail)
        self._outer_fleet = current_fleet.get()
        current_fleet.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current_fleet.set(self._outer_fleet)
        if not self._failure.done():
            self._failure.cancel()
        # An exit stack runs every callback even if one fails: a second Ctrl-C must not leave a job with its scheduler.
        async with AsyncExitStack() as stack:
            stack.callback(shut_down_at_exit)
            stack.callback(self._log_rotation.cancel)
            stack.callback(shutil.rmtree, self._scratch, ignore_errors=True)
            stack.push_async_callback(self._hosts.close)
            # All services at once: each takes seconds, mostly spent waiting for its processes.
            stop = asyncio.ensure_future(self._stop_services())
            try:
                await asyncio.shield(stop)
            except asyncio.CancelledError:
                await stop  # a second Ctrl-C must leave nothing running either
                raise

    async def _stop_services(self) -> None:
        stops = [service.stop() for service in self._services.values()]
        for failure in await asyncio.gather(*stops, return_exceptions=True):
            if failure is not None:
                raise failure

    async def launch(
        self, actor: type[ServiceActor], options: ServiceOptions, args: tuple[Any, ...]
    ) -> Service:
        """Start a service and return it when all of its replicas serve; see `BoundOptions.as_service`."""
        snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", actor.__name__.removesuffix("Actor"))
        name = options.name or snake_case.lower()
        if name in self._services:
            raise ValueError(
                f"expected a name that no other service has, got {name!r} again; set options(name=)"
            )
        service = Service(
            name,
            actor,
            args,
            options,
            start=lambda replica, host: self._start(name, replica, options, host),
            record=lambda replica, kind, detail="": self.events.append(
                FleetEvent(time.time(), name, replica, kind, detail)
            ),
            on_failure=self.fail,
            on_left=self._grow,
        )
        self._services[name] = service
        try:
            await service.start()
        except BaseException:
            del self._services[name]
            await service.stop()
            raise
        return service

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end, or cancel it and raise RoleError as soon as the run has lost an essential role."""
        task = asyncio.ensure_future(work)
        try:
            futures: set[asyncio.Future[Any]] = {task, self._failure}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not self._failure.done() and _failed_with_lost_replica(task):
                # The call in flight has failed already; the report of the reason is still to come.
                await asyncio.wait({self._failure}, timeout=REPORT_TIMEOUT_S)
            if self._failure.done() and (not task.done() or _failed_with_lost_replica(task)):
                raise self._failure.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _rotate_logs(self) -> None:
        while True:
            await asyncio.to_thread(rotate_logs, self._logs)
            await asyncio.sleep(LOG_CHECK_INTERVAL_S)

    async def add_host(self, address: str, gpus: int) -> int:
        """Attach a host that joins, and start replicas on it; returns its number.

        Args:
            address: That of the Monarch worker there.
            gpus: The number of its GPUs.

        Raises:
            RoleError: It cannot be reached.
        """
        number = self._placement.add_host(gpus)
        await self._hosts.attach(number, address)
        self._placement.set_closed(number, False)
        self._joined.append(number)
        self._record_host(number, "joined", address)
        self._grow()
        return number

    def _record_host(self, number: int, kind: str, detail: str) -> None:
        self.events.append(FleetEvent(time.time(), HOSTS, number, kind, detail))

    def _grow(self) -> None:
        for host in self._joined:
            for service in self._services.values():
                service.grow(host, self._placement.room(host, service.options))

    async def remove_host(self, number: int, *, notice: bool) -> None:
        """Take out a host that had joined: in order after a notice, or because it is lost. Bounded in time."""
        self._joined.remove(number)
        self._record_host(number, "leaving" if notice else "lost", "")
        self._placement.set_closed(number, True)
        await asyncio.gather(
            *(service.leave_host(number, notice=notice) for service in self._services.values())
        )
        await self._hosts.detach(number, reachable=notice)

    def _start(self, service: str, replica: int, options: ServiceOptions, host: int | None) -> Incarnation:
        slot = self._placement.reserve(options, time.monotonic(), host)
        try:
            mesh = self._hosts.mesh_of(slot)
        except RoleError:
            self._placement.release(slot)
            raise
        local, joined = self._hosts.is_local(slot), slot.first in self._joined
        name = f"{service}-{replica}"
        earlier_starts = self._start_counts[name]
        self._start_counts[name] += 1

        def environment(rank: int) -> dict[str, str]:
            return {
                **({"TMPDIR": str(self._scratch)} if local else {}),
                **self._hosts.variables_of(slot.gpus_of(rank), joined=joined),
                START_VARIABLE: start_of(replica, rank, earlier_starts),
                RUN_VARIABLE: self._name,
                **options.environment,
            }

        def on_lost(lost: "asyncio.Future[str]") -> None:
            if not lost.cancelled() and not lost.result().startswith(PROCESS_ENDED):
                self._placement.avoid(slot, time.monotonic())

        incarnation = Incarnation(
            name,
            mesh,
            options,
            environment,
            self._logs,
            heartbeat_s=self._heartbeat_s,
            local=local,
            host=slot.first,
            on_stopped=lambda: self._placement.release(slot),
        )
        incarnation.lost.add_done_callback(on_lost)
        return incarnation

    def fail(self, failure: BaseException) -> None:
        """Record that the run has lost an essential role: `guard` raises this error."""
        if not self._failure.done():
            self._failure.set_result(failure)


def _failed_with_lost_replica(task: "asyncio.Task[Any]") -> bool:
    return not task.cancelled() and isinstance(task.exception(), ReplicaLostError)
