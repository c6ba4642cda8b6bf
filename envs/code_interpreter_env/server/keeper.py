"""The interpreter of a session: made when it is needed, waited for, replaced when its state is gone."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import (
    Backend,
    Execution,
    FileInfo,
    Interpreter,
    Interruptible,
    SandboxFailureError,
    SandboxUnavailableError,
)
from servers.execution import keep

from .house import SharedBackend
from .options import ResetChoice

logger = logging.getLogger(__name__)

TROUBLE: Final = (SandboxFailureError, ConfigurationError, OSError)
"""What a backend may raise where the infrastructure fails; none of it is the policy's."""


class InterpreterKeeper:
    """Keeps the interpreter of one session.

    Args:
        house: Where backends come from.
        choice: How interpreters are made.

    Attributes:
        choice: Likewise; what is set here goes for the next one.
        lost: The state of the one that there is, is gone.
        brought: The files that the reset has brought to it.
    """

    def __init__(self, house: SharedBackend, choice: ResetChoice) -> None:
        self._house = house
        self.choice = choice
        self.lost = False
        self.brought: tuple[FileInfo, ...] = ()
        self._backend: Backend | None = None
        self._interpreter: Interpreter | None = None

    async def held(self) -> Backend:
        """Return the backend, started."""
        if self._backend is None:
            try:
                self._backend = await self._house.hold()
            except ConfigurationError as error:  # the server's, not that of who asked
                raise SandboxUnavailableError(str(error)) from error
        return self._backend

    async def ready(self) -> Interpreter:
        """Return the interpreter: the one that there is, a fresh one where there is none or its state is gone."""
        interpreter = self._interpreter
        if interpreter is not None and not self.lost:
            return interpreter  # one that ended between two actions says so itself, before anything runs without it
        await self.end()
        choice = self.choice
        backend = await self.held()
        interpreter = await backend.open(choice.limits, packages=choice.packages, snapshot=choice.snapshot)
        self._interpreter = interpreter
        try:
            self.brought = await self._put_back(interpreter)
        except BaseException:
            await self.end()
            raise
        self.lost = False
        return interpreter

    async def anew(self) -> Interpreter:
        """Return the interpreter, without variables, and of the files with those alone that the reset brought."""
        interpreter = self._interpreter
        if interpreter is None or self.lost:
            return await self.ready()
        await interpreter.restart()
        self.brought = await self._put_back(interpreter)
        return interpreter

    async def end(self) -> None:
        """End the interpreter, if there is one."""
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            # Whoever waits may be cancelled, as a caller that goes away is: the closing goes on.
            await asyncio.shield(keep(asyncio.create_task(_close(interpreter))))

    async def close(self) -> None:
        """End the interpreter, and let go of the backend. Idempotent."""
        try:
            await self.end()
        finally:
            if self._backend is not None:
                self._backend = None
                await self._house.release()

    async def _put_back(self, interpreter: Interpreter) -> tuple[FileInfo, ...]:
        """Put the files of the reset into a workspace that has none."""
        return tuple([await interpreter.put_file(path, data) for path, data in self.choice.files.items()])


async def _close(interpreter: Interpreter) -> None:
    try:
        await interpreter.close()
    except TROUBLE:
        logger.exception("an interpreter did not close")


PROGRESS_INTERVAL_S: Final = 1.0
"""How often a caller who waits is told so."""

INTERRUPT_ALLOWANCE_S: Final = 1.0
"""What an interrupt gets, beside the session's own grace, before the interpreter is ended after all."""


async def wait_or_interrupt(
    task: "asyncio.Task[Execution]", interpreter: Interpreter, grace_s: float, tell: Callable[[float], None]
) -> Execution:
    """Wait for an execution. It has ended when this does, however this does.

    Args:
        task: The execution.
        interpreter: What runs it.
        grace_s: What the interpreter itself gives an interrupt.
        tell: Called at once and every second with the seconds so far.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    tell(0.0)
    try:
        while not (await asyncio.wait([task], timeout=PROGRESS_INTERVAL_S))[0]:
            tell(clock() - began)
        return task.result()
    except asyncio.CancelledError:
        if isinstance(interpreter, Interruptible):
            interpreter.interrupt()
            await asyncio.wait([task], timeout=grace_s + INTERRUPT_ALLOWANCE_S)
        raise
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def lost(task: "asyncio.Task[Execution]") -> bool:
    """Whether an execution that has ended, and that nobody waits for any more, has cost the interpreter its state."""
    return task.cancelled() or task.exception() is not None or task.result().state_lost
