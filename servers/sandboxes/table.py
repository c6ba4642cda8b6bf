"""The sandboxes of a service: their owners, limits and lifetimes."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial
from secrets import token_hex, token_urlsafe
from typing import Any, Final

from openenv_core.errors import ConfigurationError, ImageNotFoundError, OpenEnvError
from openenv_core.providers.docker import ContainerOptions
from openenv_core.sandbox import Isolation, Limits, Sandbox, SandboxConfig, SandboxUnavailableError
from servers.sandboxes.guest import ApiError, Guest, GuestError
from servers.sandboxes.machines import Machine, ProcessMachine, WarmContainers

logger = logging.getLogger("servers")

PROCESS_TEMPLATES: Final = ("base", "code-interpreter-v1", "process")
"""Names of the process template, which is no image; the first two are the defaults of E2B's clients."""

POLL_INTERVAL_S: Final = 0.25
RETRY_INTERVAL_S: Final = 1.0
"""Pause before a failed removal is retried: the engine may be restarting."""

MAX_STARTING: Final = 4
"""Containers that start concurrently; others wait."""

MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """The limits of one service.

    Attributes:
        max_sandboxes: Concurrent sandboxes, paused ones included.
        max_sandboxes_per_key: The same per key; None: only `max_sandboxes` applies.
        max_timeout_s: The longest timeout of a sandbox.
        memory_bytes: Memory of a container as a whole, or of each program of a process sandbox.
        disk_bytes: All files of a process sandbox together.
        pids: Processes and threads of one sandbox.
        images: Patterns of the images that may be run, such as `my-env:*`; empty: none.
        warm: Containers kept ready, beside those in use, of the most recently requested images.
        minimum_isolation: The weakest isolation level at which process sandboxes are started.
        preload: Modules that the interpreters of process sandboxes have already imported.
    """

    max_sandboxes: int = 16
    max_sandboxes_per_key: int | None = None
    max_timeout_s: float = 86_400.0
    memory_bytes: int = 1024 * MIB
    disk_bytes: int = 256 * MIB
    pids: int = 256
    images: tuple[str, ...] = ()
    warm: int = 0
    minimum_isolation: Isolation = Isolation.LSM
    preload: tuple[str, ...] = ()

    def image(self, name: str) -> str:
        """Return the image to run for a template's name; ApiError if it is not allowed."""
        last = name.rpartition("/")[2]
        full = name if ":" in last or "@" in last else f"{name}:latest"
        for pattern in self.images:
            repository, colon, tag = pattern.rpartition(":")
            wanted = (repository, tag) if colon and "/" not in tag else (pattern, "latest")
            if pattern == "*" or all(map(fnmatchcase, full.rpartition(":")[::2], wanted)):
                return full
        raise ApiError(
            404,
            f"expected a template that this service has ({PROCESS_TEMPLATES[0]}, or an image that one of its --image "
            f"options names), got {name!r}",
        )


@dataclass(slots=True, eq=False)
class Record:
    """One sandbox.

    Attributes:
        id: Its id, which is all that a connection to its ports needs.
        owner: The name of the key that created it.
        token: The token for its files and commands.
        expires: End of its life, by the event loop's clock.
        is_ending: Whether it is to be removed, or failed to start.
        contexts: Interpreters of `run_code`: each as clients see it, and the lock held while it runs a cell.
        making: Held while a context is created.
        freezing: Held while it is paused or resumed: the engine takes a while, in which another request may come.
        snapshot_of: The sandbox whose state it keeps, if it is a snapshot and not a sandbox.
        names: The names of a snapshot.
    """

    id: str
    owner: str
    template: str
    token: str
    expires: float
    metadata: dict[str, str] = field(default_factory=dict)
    pauses: bool = False
    allow_internet: bool = True
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    machine: Machine | None = None
    paused: bool = False
    is_ending: bool = False
    starting: "asyncio.Task[None] | None" = None
    ending: "asyncio.Task[None] | None" = None
    contexts: dict[str, tuple[dict[str, str], asyncio.Lock]] = field(default_factory=dict)
    making: asyncio.Lock = field(default_factory=asyncio.Lock)
    freezing: asyncio.Lock = field(default_factory=asyncio.Lock)
    snapshot_of: str | None = None
    names: tuple[str, ...] = ()

    @property
    def guest(self) -> Guest:
        """The client of its agent."""
        assert self.machine is not None
        return self.machine.guest

    @property
    def end_at(self) -> datetime:
        """When it expires."""
        left = self.expires - asyncio.get_running_loop().time()
        return datetime.now(UTC) + timedelta(seconds=left)


class SandboxTable:
    """All sandboxes of one service, each accessible to its owner alone. Not thread-safe: lives on one event loop."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self._records: dict[str, Record] = {}
        self._starting = asyncio.Semaphore(MAX_STARTING)
        self._warm = WarmContainers(limits.warm)
        self._sandbox: Sandbox | None = None
        self._unavailable_reason = "the service has not started"
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Start the zygote from which process sandboxes are forked.

        Raises:
            SandboxUnavailableError: This machine cannot isolate processes, and no images are allowed either.
        """
        limits = self.limits
        sandbox = Sandbox(SandboxConfig(minimum=limits.minimum_isolation, preload=limits.preload))
        try:
            await sandbox.start()
        except SandboxUnavailableError as error:
            if not limits.images:
                raise
            self._unavailable_reason = str(error)
            logger.warning("only images can be used as templates: %s", error)
        else:
            self._sandbox = sandbox

    async def create(
        self, owner: str, template: str, timeout_s: float, envs: dict[str, str], **fields: Any
    ) -> Record:
        """Start a sandbox; return it when its agent replies.

        Args:
            owner: The name of the key that creates it.
            template: Its source: a process template, an image or a snapshot's id.
            timeout_s: Seconds until it expires.
            envs: Environment variables.
            fields: Other fields of the record.

        Raises:
            ApiError: It is not allowed, or does not start.
        """
        source = self._records.get(template)
        if source is not None and source.owner == owner and source.snapshot_of is not None:
            return await self.fork(source, timeout_s, envs, **fields)
        record = self._make_record(owner, template, timeout_s, **fields)
        return await self._begin_start(record, self._machine(record), envs)

    async def fork(
        self, source: Record, timeout_s: float, envs: dict[str, str] | None = None, **fields: Any
    ) -> Record:
        """Start a copy of a sandbox or snapshot, with its interpreters and files.

        Args:
            source: The sandbox or snapshot to copy.
            timeout_s: Seconds until the copy expires.
            envs: Environment variables in addition to the original's.
            fields: Fields of the record that differ from the original's.

        Raises:
            ApiError: The source is paused, runs code or is a container, or its files cannot be copied.
        """
        if source.paused or any(start_slot.locked() for _, start_slot in source.contexts.values()):
            raise ApiError(409, "the sandbox is paused or runs code; fork it later")
        machine = source.machine
        assert machine is not None
        fields = {"metadata": source.metadata, "allow_internet": source.allow_internet, **fields}
        record = self._make_record(source.owner, source.template, timeout_s, **fields)
        known = dict(source.contexts)
        await self._begin_start(record, partial(machine.fork, list(known)), envs or {})
        for name, (context, _) in known.items():
            cwd = context["cwd"]
            if cwd.startswith(machine.guest.home):
                cwd = record.guest.home + cwd.removeprefix(machine.guest.home)
            record.contexts[name] = ({**context, "cwd": cwd}, asyncio.Lock())
        return record

    def _make_record(self, owner: str, template: str, timeout_s: float, **fields: Any) -> Record:
        if self._closing:
            raise ApiError(503, "the service is stopping")
        owner_count = sum(each.owner == owner for each in self._records.values())
        for count, cap, owner_text in (
            (len(self._records), self.limits.max_sandboxes, ""),
            (owner_count, self.limits.max_sandboxes_per_key, " of one key"),
        ):
            if cap is not None and count >= cap:
                raise ApiError(
                    429, f"there are {cap} sandboxes{owner_text}, the most allowed; kill one, or retry later"
                )
        return Record(
            token_hex(10), owner, template, token_urlsafe(24), self._deadline_after(timeout_s), **fields
        )

    async def _begin_start(
        self, record: Record, start: Callable[[], Awaitable[Machine]], envs: dict[str, str]
    ) -> Record:
        self._records[record.id] = record
        if self._reaper is None:
            self._reaper = self.spawn(self._reap(), "reaper of sandboxes")
        record.starting = self.spawn(self._start(record, start, envs), f"start of {record.id}")
        try:
            await asyncio.shield(record.starting)
        except ImageNotFoundError as error:
            raise ApiError(404, str(error)) from None
        except ConfigurationError as error:
            raise ApiError(400, str(error)) from None
        except (OpenEnvError, TimeoutError, OSError) as error:
            logger.warning("sandbox %s was not started: %s", record.id, error)
            raise ApiError(500, f"{type(error).__name__}: {error}") from None
        if record.is_ending:
            raise ApiError(
                503, "the service is stopping" if self._closing else "the sandbox ended during its start"
            )
        return record

    def records(self, owner: str | None = None, *, snapshots: bool = False) -> list[Record]:
        """Return the sandboxes, or the snapshots, of an owner or of all owners, in the order of creation."""
        return [
            each
            for each in self._records.values()
            if each.machine is not None
            and not each.is_ending
            and owner in (None, each.owner)
            and (each.snapshot_of is not None) == snapshots
        ]

    def find(self, sandbox_id: str, owner: str | None = None, *, snapshots: bool = False) -> Record | None:
        """Return a sandbox or snapshot by its id; None if there is none, or none of this owner's."""
        records = self.records(owner, snapshots=snapshots)
        return next((each for each in records if each.id == sandbox_id), None)

    def set_timeout(self, record: Record, timeout_s: float, *, only_longer: bool = False) -> None:
        """Set the seconds until a sandbox expires, from now; ApiError if they exceed the limit."""
        expires = self._deadline_after(timeout_s)
        record.expires = max(expires, record.expires) if only_longer and not record.paused else expires

    async def freeze(self, record: Record, *, frozen: bool) -> None:
        """Pause a sandbox, with its memory and processes, or resume it. It keeps its slot."""
        async with record.freezing:
            if record.machine is not None and record.paused != frozen:
                await record.machine.freeze(frozen=frozen)
                record.paused = frozen

    def end(self, record: Record) -> "asyncio.Task[None]":
        """Start to remove a sandbox, unless its removal has started; return the removal's task."""
        record.is_ending = True
        if record.ending is None:
            record.ending = self.spawn(self._remove(record), f"end of {record.id}")
        return record.ending

    async def close(self, deadline_s: float) -> None:
        """End every sandbox and start no more."""
        self._closing = True
        endings = [self.end(record) for record in list(self._records.values())]
        if endings:
            await asyncio.wait(endings, timeout=deadline_s)
        if self._records:
            logger.error(
                "sandboxes still running, left to their guards: %s", ", ".join(sorted(self._records))
            )
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        await self._warm.close()
        if self._sandbox is not None:
            await self._sandbox.close()

    def spawn(self, work: Any, name: str) -> "asyncio.Task[Any]":
        """Run a background task, which is cancelled when the service closes."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if task is self._reaper:
            self._reaper = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("%s failed: %s", task.get_name(), error)

    def _machine(self, record: Record) -> Callable[[], Awaitable[Machine]]:
        """Return the function that starts a record's machine."""
        limits = self.limits
        if record.template not in PROCESS_TEMPLATES:
            options = ContainerOptions(
                memory=limits.memory_bytes,
                pids=limits.pids,
                network="bridge" if record.allow_internet else "none",
                read_only=False,
                tmpfs=(),
            )
            return partial(self._warm.take, limits.image(record.template), options)
        if self._sandbox is None:
            raise ApiError(
                501, f"this machine does not support process sandboxes: {self._unavailable_reason}"
            )
        of_session = Limits(
            memory_bytes=limits.memory_bytes,
            disk_bytes=limits.disk_bytes,
            file_bytes=limits.disk_bytes,
            files=16_384,
            open_files=256,
            processes=limits.pids,
            output_hard_bytes=1 << 40,
        )
        return partial(ProcessMachine.start, self._sandbox, of_session)

    async def _start(
        self, record: Record, start: Callable[[], Awaitable[Machine]], envs: dict[str, str]
    ) -> None:
        machine: Machine | None = None
        start_slot = contextlib.nullcontext() if record.template in PROCESS_TEMPLATES else self._starting
        try:
            async with start_slot:
                if record.is_ending:
                    return
                machine = await start()
                await machine.begin({"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": record.id, **envs})
            record.machine = machine
            machine.guest.gone.add_done_callback(lambda _: self.end(record))
        except BaseException:
            record.is_ending = True
            if machine is not None:
                with contextlib.suppress(Exception):
                    await machine.close()
            self._records.pop(record.id, None)
            raise

    async def _remove(self, record: Record) -> None:
        if record.starting is not None and not record.starting.done():
            await asyncio.wait([record.starting])
        while record.machine is not None:
            try:
                await record.machine.close()
                break
            except OpenEnvError as error:
                logger.warning("sandbox %s could not be removed; retrying: %s", record.id, error)
                await asyncio.sleep(RETRY_INTERVAL_S)
        self._records.pop(record.id, None)

    async def _reap(self) -> None:
        while self._records:
            await asyncio.sleep(POLL_INTERVAL_S)
            now = asyncio.get_running_loop().time()
            for record in list(self._records.values()):
                keeps = record.is_ending or record.paused or record.snapshot_of is not None
                if keeps or now < record.expires:
                    continue
                if record.pauses and record.machine is not None:
                    with contextlib.suppress(OpenEnvError, GuestError):
                        await self.freeze(record, frozen=True)
                        continue
                self.end(record)

    def _deadline_after(self, timeout_s: float) -> float:
        """Return the deadline of a timeout, by the event loop's clock; ApiError if it exceeds the limit."""
        if not 0 <= timeout_s <= (max_timeout_s := self.limits.max_timeout_s):
            raise ApiError(
                400, f"Timeout cannot be greater than {max_timeout_s:g} seconds, got {timeout_s:g}"
            )
        return asyncio.get_running_loop().time() + timeout_s
