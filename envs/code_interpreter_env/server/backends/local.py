"""The local backend: code runs in sandboxes on this machine, one for each requested set of packages."""

import asyncio
from dataclasses import dataclass, field
from typing import TypeAlias

from openenv_core.sandbox import Interpreter, Isolation, Limits, SandboxUnavailableError
from openenv_core.sandbox.config import SandboxConfig
from openenv_core.sandbox.sandbox import Sandbox

from ..settings import PREFIX, InterpreterSettings

Packages: TypeAlias = tuple[str, ...]


@dataclass(slots=True)
class _SandboxEntry:
    """The sandbox of one set of packages."""

    sandbox: Sandbox
    start_task: asyncio.Task[None]
    opening_count: int = 0
    last_used_at: float = field(default=0.0)

    @property
    def is_idle(self) -> bool:
        """Whether the sandbox has no sessions and none is opening."""
        return not self.opening_count and not self.sandbox.sessions


class LocalBackend:
    """Opens interpreters in sandboxes of this process.

    A sandbox starts when its set of packages is first requested, and keeps running. At the maximum number of sandboxes,
    the least recently used one without sessions is closed.

    Attributes:
        isolation: The level that the start-up self-test has proved; empty before.
    """

    def __init__(self, settings: InterpreterSettings, minimum: Isolation) -> None:
        self._settings = settings
        self._minimum = minimum
        self.isolation = ""
        self._entries: dict[Packages, _SandboxEntry] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the sandbox of the default packages.

        Raises:
            SandboxUnavailableError: No isolation level at or above the minimum works here.
        """
        entry = self._add_entry(self._settings.preload)
        await self._wait_started(entry, self._settings.preload)
        self.isolation = str(entry.sandbox.isolation)

    async def open(self, limits: Limits, *, packages: Packages = (), snapshot: bool = False) -> Interpreter:
        """Start an interpreter; see `openenv_core.sandbox.Backend`.

        Raises:
            SandboxUnavailableError: No interpreter is available at the moment.
        """
        entry = self._entries.get(packages)
        if entry is None:
            self._make_room()
            entry = self._add_entry(packages)
        entry.opening_count += 1
        try:
            if not entry.start_task.done() or entry.start_task.exception() is not None:
                await self._wait_started(entry, packages)
            entry.last_used_at = asyncio.get_running_loop().time()
            return await entry.sandbox.open(limits, snapshot=snapshot)
        finally:
            entry.opening_count -= 1

    async def close(self) -> None:
        """Close all sandboxes and their sessions. Idempotent."""
        entries, self._entries = list(self._entries.values()), {}
        await asyncio.gather(*(self._close_entry(entry) for entry in entries), *self._closing)

    def _add_entry(self, packages: Packages) -> _SandboxEntry:
        config = SandboxConfig(
            preload=packages,
            strongest=self._settings.strongest_isolation,
            minimum=self._minimum,
            # Hidden tests may be in folders that code can read, such as Python's own.
            hidden=self._settings.task_files,
        )
        sandbox = Sandbox(config)
        entry = self._entries[packages] = _SandboxEntry(sandbox, asyncio.create_task(sandbox.start()))
        entry.last_used_at = asyncio.get_running_loop().time()
        return entry

    async def _wait_started(self, entry: _SandboxEntry, packages: Packages) -> None:
        """Wait until a sandbox has started; drop its entry if it fails. Several sessions may wait for one sandbox."""
        try:
            await asyncio.shield(entry.start_task)
        except asyncio.CancelledError:
            raise
        except BaseException:
            if self._entries.get(packages) is entry:
                del self._entries[packages]
            raise

    def _make_room(self) -> None:
        if len(self._entries) < self._settings.max_sandboxes:
            return
        idle = [(entry.last_used_at, packages) for packages, entry in self._entries.items() if entry.is_idle]
        if not idle:
            raise SandboxUnavailableError(
                f"expected at most {self._settings.max_sandboxes} sets of packages in use at once, got one more; ask "
                f"for a set that is in use, or raise {PREFIX}MAX_SANDBOXES"
            )
        closing = asyncio.create_task(self._close_entry(self._entries.pop(min(idle)[1])))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    @staticmethod
    async def _close_entry(entry: _SandboxEntry) -> None:
        if not entry.start_task.done():
            entry.start_task.cancel()
        await asyncio.gather(entry.start_task, return_exceptions=True)
        await entry.sandbox.close()
