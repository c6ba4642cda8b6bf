"""Code runs on this machine, in the sandbox: one for each set of packages that is asked for."""

import asyncio
from dataclasses import dataclass, field
from typing import TypeAlias

from openenv_core.sandbox import Interpreter, Isolation, Limits, SandboxUnavailableError
from openenv_core.sandbox.config import SandboxConfig
from openenv_core.sandbox.sandbox import Sandbox

from ..settings import PREFIX, InterpreterSettings

Packages: TypeAlias = tuple[str, ...]


@dataclass(slots=True)
class _Kept:
    """The sandbox of one set of packages."""

    sandbox: Sandbox
    ready: asyncio.Task[None]
    opening: int = 0
    used: float = field(default=0.0)

    @property
    def idle(self) -> bool:
        """Whether nothing would be missed if it were closed."""
        return not self.opening and not self.sandbox.sessions


class LocalBackend:
    """Opens interpreters in sandboxes of this process.

    A sandbox starts when its set of packages is first asked for, and stays. Where there are as many as may be, the
    one that was not asked for the longest is closed, if no session is left in it.

    Attributes:
        isolation: The level that the start-up self-test has proved; empty before.
    """

    def __init__(self, settings: InterpreterSettings, minimum: Isolation) -> None:
        self._settings = settings
        self._minimum = minimum
        self.isolation = ""
        self._kept: dict[Packages, _Kept] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the sandbox of the packages that sessions have by default.

        Raises:
            SandboxUnavailableError: No level at or above the minimum holds here.
        """
        kept = self._keep(self._settings.preload)
        await self._wait_started(kept, self._settings.preload)
        self.isolation = str(kept.sandbox.isolation)

    async def open(self, limits: Limits, *, packages: Packages = (), snapshot: bool = False) -> Interpreter:
        """Start an interpreter; see `openenv_core.sandbox.Backend`. SandboxUnavailableError: None can be had now."""
        kept = self._kept.get(packages)
        if kept is None:
            self._make_room()
            kept = self._keep(packages)
        kept.opening += 1
        try:
            if not kept.ready.done() or kept.ready.exception() is not None:
                await self._wait_started(kept, packages)
            kept.used = asyncio.get_running_loop().time()
            return await kept.sandbox.open(limits, snapshot=snapshot)
        finally:
            kept.opening -= 1

    async def close(self) -> None:
        """End every session and every sandbox. Idempotent."""
        kept, self._kept = list(self._kept.values()), {}
        await asyncio.gather(*(self._close_kept(session) for session in kept), *self._closing)

    def _keep(self, packages: Packages) -> _Kept:
        config = SandboxConfig(
            preload=packages,
            strongest=self._settings.strongest_isolation,
            minimum=self._minimum,
            # Tests of tasks may lie where code may read: below Python's own folders, for one.
            hidden=self._settings.task_files,
        )
        sandbox = Sandbox(config)
        kept = self._kept[packages] = _Kept(sandbox, asyncio.create_task(sandbox.start()))
        kept.used = asyncio.get_running_loop().time()
        return kept

    async def _wait_started(self, kept: _Kept, packages: Packages) -> None:
        """Wait for a sandbox that others may wait for too; one that does not start is forgotten."""
        try:
            await asyncio.shield(kept.ready)
        except asyncio.CancelledError:
            raise
        except BaseException:
            if self._kept.get(packages) is kept:
                del self._kept[packages]
            raise

    def _make_room(self) -> None:
        if len(self._kept) < self._settings.max_sandboxes:
            return
        idle = [(kept.used, packages) for packages, kept in self._kept.items() if kept.idle]
        if not idle:
            raise SandboxUnavailableError(
                f"expected at most {self._settings.max_sandboxes} sets of packages in use at once, got one more; ask "
                f"for a set that is in use, or raise {PREFIX}MAX_SANDBOXES"
            )
        closing = asyncio.create_task(self._close_kept(self._kept.pop(min(idle)[1])))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    @staticmethod
    async def _close_kept(kept: _Kept) -> None:
        if not kept.ready.done():
            kept.ready.cancel()
        await asyncio.gather(kept.ready, return_exceptions=True)
        await kept.sandbox.close()
