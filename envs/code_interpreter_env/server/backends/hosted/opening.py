"""What a backend does with the interpreters that it opens."""

import asyncio
from typing import Generic, TypeVar

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import SandboxUnavailable

from .errors import HostFailure
from .interpreter import HostedInterpreter

InterpreterT = TypeVar("InterpreterT", bound=HostedInterpreter)


class Opened(Generic[InterpreterT]):
    """The interpreters of one backend, to be closed with it."""

    def __init__(self) -> None:
        self._all: set[InterpreterT] = set()

    async def add(self, interpreter: InterpreterT) -> InterpreterT:
        """Open an interpreter, and return it.

        Raises:
            SandboxUnavailable: It cannot be opened.
            ConfigurationError: A package cannot be imported there.
        """
        self._all = {each for each in self._all if not each.closed} | {interpreter}
        try:
            await interpreter.open()
        except HostFailure as failure:
            raise SandboxUnavailable(str(failure)) from failure
        return interpreter

    async def close(self) -> None:
        """Close all of them."""
        await asyncio.gather(*(each.close() for each in self._all), return_exceptions=True)
        self._all = set()


def refuse_snapshots(snapshot: bool) -> None:
    """Refuse what only an interpreter on this machine has.

    Raises:
        ConfigurationError: A snapshot is asked for.
    """
    if snapshot:
        raise ConfigurationError(
            "expected a session without snapshots, which only the local sandbox has; leave snapshot out"
        )
