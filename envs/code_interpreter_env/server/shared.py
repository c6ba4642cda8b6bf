"""The backend that all sessions of a process share, and the interpreter of one session.

The backend starts with its first holder and closes after the last. An interpreter is created on first use and replaced
once its state is lost.
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
    Limits,
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
"""The exceptions of a backend when the infrastructure fails; none is the policy's fault."""

PROGRESS_INTERVAL_S: Final = 1.0
"""The interval of progress reports to a waiting caller."""

INTERRUPT_ALLOWANCE_S: Final = 1.0
"""Extra time for an interrupt, beyond the session's grace period, before the execution is cancelled."""


@dataclass(slots=True)
class _LoopBackend:
    """The backend of one event loop, and the number of its holders."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    backend: Backend | None = None
    holders: int = 0


class SharedBackend:
    """A reference-counted backend, running while it has holders.

    A server holds it for as long as it runs. If the lifespan is not run (the app is mounted below another one, or there
    is no server), each session holds it from its first use to its end.

    Attributes:
        exposed: Whether the server is reachable from other machines; None if unknown.
    """

    def __init__(self, settings: InterpreterSettings) -> None:
        self.settings = settings
        self.exposed: bool | None = None
        self._backends: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopBackend] = (
            weakref.WeakKeyDictionary()
        )

    @cached_property
    def tasks(self) -> JsonlTasks | None:
        """The server's tasks; None if it has none. Raises ConfigurationError if they cannot be read."""
        return open_tasks(self.settings.tasks)

    async def hold(self) -> Backend:
        """Return the started backend; pair each call with one of `release`.

        Raises:
            SandboxUnavailableError: The backend cannot start here.
            ConfigurationError: Its isolation is weaker than required, or a setting is invalid.
        """
        loop_backend = self._get_loop_backend()
        async with loop_backend.lock:
            if loop_backend.backend is None:
                loop_backend.backend = await self._start()
            loop_backend.holders += 1
            return loop_backend.backend

    async def release(self) -> None:
        """Release the backend; the last holder's release closes it."""
        loop_backend = self._get_loop_backend()
        async with loop_backend.lock:
            loop_backend.holders -= 1
            if not loop_backend.holders and loop_backend.backend is not None:
                backend, loop_backend.backend = loop_backend.backend, None
                await backend.close()

    @asynccontextmanager
    async def lifespan(self, app: EnvironmentApp) -> AsyncIterator[None]:
        """Hold the backend while an app is served.

        Raises:
            ConfigurationError: The isolation is too weak for the server's exposure, or the tasks cannot be read.
            SandboxUnavailableError: The backend cannot start here.
        """
        self.exposed = app.settings.exposed
        _ = self.tasks  # report unreadable tasks at start-up
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
    """Raise if a local backend's isolation level is too weak; hosted backends have no level and are not checked."""
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
    """The interpreter of one session: creates, replaces and closes it.

    Attributes:
        choice: The options for creating an interpreter; a change applies to the next one.
        lost: Whether the current interpreter's state is lost.
        initial_files: The files from the reset options, as put into the current interpreter.
    """

    def __init__(self, shared: SharedBackend, choice: ResetChoice) -> None:
        self._shared = shared
        self.choice = choice
        self.lost = False
        self.initial_files: tuple[FileInfo, ...] = ()
        self._backend: Backend | None = None
        self._interpreter: Interpreter | None = None

    async def start_backend(self) -> Backend:
        """Return the backend, held by this session and started."""
        if self._backend is None:
            try:
                self._backend = await self._shared.hold()
            except ConfigurationError as error:  # the server's fault, not the client's
                raise SandboxUnavailableError(str(error)) from error
        return self._backend

    async def open(self, limits: Limits) -> Interpreter:
        """Start an interpreter apart from the session's own, for grading submissions; the caller closes it."""
        return await (await self.start_backend()).open(limits, packages=self.choice.packages)

    async def ensure_ready(self) -> Interpreter:
        """Return the interpreter, after replacing it if there is none or its state is lost."""
        interpreter = self._interpreter
        if interpreter is not None and not self.lost:
            return interpreter  # if it died between two actions, it reports that before running anything
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
        """Return the interpreter after clearing its variables and all files except those given at reset."""
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
            interpreter: The interpreter that `ensure_ready` returned.
            code: Python source.
            timeout_s: Timeout in seconds, if lower than the session's limit.
            stdin: The code's standard input.
            progress: Called at once and every second with the elapsed seconds. If it is given, cancelling this
                call interrupts the code, and the execution has always ended when this call returns or raises.
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
        """Fork the interpreter, if any. The caller closes the returned branch.

        Raises:
            NotForkableError: The interpreter does not support forks.
            SandboxFailureError: The fork failed.
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
        """Replace the interpreter by a fork of a branch."""
        await self.end()
        self.choice, self.initial_files, self.lost = branch.choice, branch.initial_files, False
        if branch.interpreter is not None:
            await self.start_backend()
            (self._interpreter,) = await branch.interpreter.fork(1)

    async def end(self) -> None:
        """Close the interpreter, if any."""
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            # Shielded: closing continues if this call is cancelled, as it is when the client disconnects.
            await asyncio.shield(keep(asyncio.create_task(_close(interpreter))))

    async def close(self) -> None:
        """Close the interpreter and release the backend. Idempotent."""
        try:
            await self.end()
        finally:
            if self._backend is not None:
                self._backend = None
                await self._shared.release()

    async def _put_files(self, interpreter: Interpreter) -> tuple[FileInfo, ...]:
        """Put the files given at reset into an empty workspace."""
        return tuple([await interpreter.put_file(path, data) for path, data in self.choice.files.items()])


@dataclass(frozen=True, slots=True)
class KeptBranch:
    """A fork of a session's interpreter, kept unused as a snapshot. It holds the backend until closed."""

    shared: SharedBackend
    choice: ResetChoice
    initial_files: tuple[FileInfo, ...]
    interpreter: Branching | None

    async def close(self) -> None:
        """Close the fork and release the backend."""
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
    """Return the backend that the sessions of this process share, configured by environment variables.

    Raises:
        ConfigurationError: A variable has an invalid value.
    """
    return SharedBackend(InterpreterSettings.from_environment(os.environ))
