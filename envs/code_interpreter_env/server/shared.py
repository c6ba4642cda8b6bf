"""The backend that all sessions of a process share, and the interpreter of one session.

The backend is started for the first session that needs it, and closed after the last. An interpreter is made when it is
needed, waited for, and replaced when its state is gone.
"""

import asyncio
import logging
import os
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final

from openenv_core.errors import ConfigurationError, NotForkableError
from openenv_core.sandbox import (
    Backend,
    Branching,
    Execution,
    FileInfo,
    Interpreter,
    Interruptible,
    Isolation,
    SandboxFailureError,
    SandboxUnavailableError,
)
from servers.app import EnvironmentApp
from servers.execution import keep

from ..grading import JsonlTasks
from .backends import make_backend
from .options import ResetChoice, open_tasks
from .settings import InterpreterSettings, describe_remedy

logger = logging.getLogger(__name__)

INFRASTRUCTURE_ERRORS: Final = (SandboxFailureError, ConfigurationError, OSError)
"""What a backend may raise where the infrastructure fails; none of it is the policy's."""

PROGRESS_INTERVAL_S: Final = 1.0
"""How often a caller who waits is told so."""

INTERRUPT_ALLOWANCE_S: Final = 1.0
"""What an interrupt gets, beside the session's own grace, before the interpreter is ended after all."""


@dataclass(slots=True)
class _LoopBackend:
    """A backend on one event loop, and the number of its holders."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    backend: Backend | None = None
    holders: int = 0


class SharedBackend:
    """Keeps one backend running while it has holders.

    A server holds it for as long as it runs. Where nobody runs the server's lifespan (below another application, or
    without a server), sessions hold it from their first use to their end.

    Attributes:
        exposed: Whether callers beyond this machine reach the server; None: not known.
    """

    def __init__(self, settings: InterpreterSettings) -> None:
        self.settings = settings
        self.exposed: bool | None = None
        self._backends: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopBackend] = (
            weakref.WeakKeyDictionary()
        )

    @cached_property
    def tasks(self) -> JsonlTasks | None:
        """Where tasks come from; None where the server has none. ConfigurationError: they cannot be read."""
        return open_tasks(self.settings.tasks)

    async def hold(self) -> Backend:
        """Return the backend, started; each call is to be followed by one of `release`.

        Raises:
            SandboxUnavailableError: It cannot be had here.
            ConfigurationError: The isolation that it has is weaker than it must be, or a setting is wrong.
        """
        loop_backend = self._get_loop_backend()
        async with loop_backend.lock:
            if loop_backend.backend is None:
                loop_backend.backend = await self._start()
            loop_backend.holders += 1
            return loop_backend.backend

    async def release(self) -> None:
        """Release it; after the last holder it is closed."""
        loop_backend = self._get_loop_backend()
        async with loop_backend.lock:
            loop_backend.holders -= 1
            if not loop_backend.holders and loop_backend.backend is not None:
                backend, loop_backend.backend = loop_backend.backend, None
                await backend.close()

    @asynccontextmanager
    async def lifespan(self, app: EnvironmentApp) -> AsyncIterator[None]:
        """Hold it while an app is served.

        Raises:
            ConfigurationError: The isolation is too weak for whom the server can be reached by.
            SandboxUnavailableError: It cannot be had here.
        """
        self.exposed = app.settings.exposed
        _ = self.tasks  # what cannot be read is told now
        await self.hold()
        try:
            yield
        finally:
            await self.release()

    def _get_loop_backend(self) -> _LoopBackend:
        return self._backends.setdefault(asyncio.get_running_loop(), _LoopBackend())

    async def _start(self) -> Backend:
        minimum = self.settings.required_isolation(self.exposed)
        backend = make_backend(self.settings, minimum)
        try:
            await backend.start()
            _require_isolation(backend, minimum)
        except BaseException as error:
            await backend.close()
            if isinstance(error, SandboxUnavailableError) and minimum is not Isolation.PROCESS:
                raise SandboxUnavailableError(f"{error}; {describe_remedy()}") from error
            raise
        return backend


def _require_isolation(backend: Backend, minimum: Isolation) -> None:
    """Refuse a rung of the ladder that is too low. What a hosted backend has instead is its host's affair."""
    try:
        level = Isolation(backend.isolation)
    except ValueError:
        return
    if not level.at_least(minimum):
        raise ConfigurationError(
            f"expected an isolation of at least {minimum}, got {level}, the strongest that holds here; "
            f"{describe_remedy(level)}"
        )


class InterpreterKeeper:
    """Keeps the interpreter of one session.

    Attributes:
        choice: How one is made; what is set here goes for the next one.
        lost: The state of the one that there is, is gone.
        initial_files: The files that the reset has brought to it.
    """

    def __init__(self, shared: SharedBackend, choice: ResetChoice) -> None:
        self._shared = shared
        self.choice = choice
        self.lost = False
        self.initial_files: tuple[FileInfo, ...] = ()
        self._backend: Backend | None = None
        self._interpreter: Interpreter | None = None

    async def start_backend(self) -> Backend:
        """Return the backend, started."""
        if self._backend is None:
            try:
                self._backend = await self._shared.hold()
            except ConfigurationError as error:  # the server's, not that of who asked
                raise SandboxUnavailableError(str(error)) from error
        return self._backend

    async def ensure_ready(self) -> Interpreter:
        """Return the interpreter: the one that there is, a fresh one where there is none or its state is gone."""
        interpreter = self._interpreter
        if interpreter is not None and not self.lost:
            return interpreter  # one that ended between two actions says so itself, before anything runs without it
        await self.end()
        choice = self.choice
        backend = await self.start_backend()
        interpreter = await backend.open(choice.limits, packages=choice.packages, snapshot=choice.snapshot)
        self._interpreter = interpreter
        try:
            self.initial_files = await self._put_files(interpreter)
        except BaseException:
            await self.end()
            raise
        self.lost = False
        return interpreter

    async def restart(self) -> Interpreter:
        """Return the interpreter, without variables, and of the files with those alone that the reset brought."""
        interpreter = self._interpreter
        if interpreter is None or self.lost:
            return await self.ensure_ready()
        await interpreter.restart()
        self.initial_files = await self._put_files(interpreter)
        return interpreter

    async def run(
        self,
        interpreter: Interpreter,
        code: str,
        *,
        timeout_s: float | None = None,
        stdin: str | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Execution:
        """Run code in the interpreter.

        Args:
            interpreter: The one that is ready.
            code: Python source.
            timeout_s: Seconds, where less than the limit of the session.
            stdin: What it reads.
            progress: Called at once and every second with the seconds so far. A caller who has it and gives up
                interrupts the code; the execution has ended when this does, however this does.
        """
        pending = interpreter.execute(code, timeout_s=timeout_s, stdin=stdin)
        if progress is None:
            execution = await pending
        else:
            task = asyncio.ensure_future(pending)
            try:
                execution = await self._wait_or_interrupt(task, interpreter, progress)
            except asyncio.CancelledError:
                self.lost = task.cancelled() or task.exception() is not None or task.result().state_lost
                raise
        self.lost = execution.state_lost
        return execution

    async def _wait_or_interrupt(
        self, task: "asyncio.Task[Execution]", interpreter: Interpreter, progress: Callable[[float], None]
    ) -> Execution:
        clock = asyncio.get_running_loop().time
        start = clock()
        progress(0.0)
        try:
            while not (await asyncio.wait([task], timeout=PROGRESS_INTERVAL_S))[0]:
                progress(clock() - start)
            return task.result()
        except asyncio.CancelledError:
            if isinstance(interpreter, Interruptible):
                interpreter.interrupt()
                await asyncio.wait([task], timeout=self.choice.limits.grace_s + INTERRUPT_ALLOWANCE_S)
            raise
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def branch(self) -> "KeptBranch":
        """Fork the interpreter, if there is one; whoever asks closes what is returned.

        Raises:
            NotForkableError: It cannot be forked.
            SandboxFailureError: It can, and was not.
        """
        interpreter: Branching | None = None
        if self._interpreter is not None and not self.lost:
            if not isinstance(self._interpreter, Branching) or not self.choice.snapshot:
                raise NotForkableError(
                    "expected an interpreter that can be forked, got one that cannot; reset with snapshot=true, on a "
                    "server whose code runs locally"
                )
            (interpreter,) = await self._interpreter.fork(1)
        try:
            await self._shared.hold()
        except BaseException:
            if interpreter is not None:
                await _close(interpreter)
            raise
        return KeptBranch(self._shared, self.choice, self.initial_files, interpreter)

    async def adopt(self, branch: "KeptBranch") -> None:
        """Go on from a branch: from a fork of it."""
        await self.end()
        self.choice, self.initial_files, self.lost = branch.choice, branch.initial_files, False
        if branch.interpreter is not None:
            await self.start_backend()
            (self._interpreter,) = await branch.interpreter.fork(1)

    async def end(self) -> None:
        """End the interpreter, if there is one."""
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            # Whoever waits may be cancelled, as a caller that goes away is: the closing goes on.
            await asyncio.shield(keep(asyncio.create_task(_close(interpreter))))

    async def close(self) -> None:
        """Close the interpreter, and release the backend. Idempotent."""
        try:
            await self.end()
        finally:
            if self._backend is not None:
                self._backend = None
                await self._shared.release()

    async def _put_files(self, interpreter: Interpreter) -> tuple[FileInfo, ...]:
        """Put the files of the reset into a workspace that has none."""
        return tuple([await interpreter.put_file(path, data) for path, data in self.choice.files.items()])


@dataclass(frozen=True, slots=True)
class KeptBranch:
    """Where the interpreter of a session stood: a branch of it that nobody uses, and the backend, held for this."""

    shared: SharedBackend
    choice: ResetChoice
    initial_files: tuple[FileInfo, ...]
    interpreter: Branching | None

    async def close(self) -> None:
        """End the branch."""
        try:
            if self.interpreter is not None:
                await _close(self.interpreter)
        finally:
            await self.shared.release()


async def _close(interpreter: Interpreter) -> None:
    try:
        await interpreter.close()
    except INFRASTRUCTURE_ERRORS:
        logger.exception("an interpreter did not close")


@lru_cache(maxsize=1)
def shared_backend() -> SharedBackend:
    """Return what the sessions of this process share, by its environment variables.

    Raises:
        ConfigurationError: A variable cannot be used.
    """
    return SharedBackend(InterpreterSettings.from_environment(os.environ))
