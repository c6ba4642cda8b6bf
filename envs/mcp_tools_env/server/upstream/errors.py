"""The wire to a tool server, and what can go wrong on it. None of it leaves the environment as an exception."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mcp.client import Transport

from openenv_core.tools import ToolErrorType


class UpstreamError(Exception):
    """The base of errors of upstream servers."""


class ServerFailedError(UpstreamError):
    """A tool server did not start, or has died: its connection cannot be used any more."""


class AddressRefusedError(UpstreamError):
    """An address that a tool server may not have."""


class CallError(UpstreamError):
    """A call came to nothing.

    Attributes:
        error_type: How.
        infrastructure: It tells nothing of the policy.
    """

    def __init__(self, error_type: ToolErrorType, message: str, *, infrastructure: bool = False) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.infrastructure = infrastructure


def unwrap_group(error: BaseException) -> BaseException:
    """Return the first error that is none of a group of them: the SDK's tasks raise groups."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error


def describe_error(error: BaseException) -> str:
    """Return an error in words, of one line that is not too long."""
    cause = unwrap_group(error)
    message = " ".join(str(cause).split())
    return (message or type(cause).__name__)[:500]


class FirstFailure:
    """The first failure since it was last taken."""

    def __init__(self) -> None:
        self._message: str | None = None
        self.event = asyncio.Event()

    def note(self, message: str) -> None:
        """Record a failure."""
        if self._message is None:
            self._message = message
            self.event.set()

    def take(self) -> str | None:
        """Return the failure, and clear it."""
        message, self._message = self._message, None
        self.event.clear()
        return message


async def _wait_forever() -> str:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    return await future


async def _do_nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class UpstreamWire:
    """How a server is reached. By default it has no voice beside its answers, and its death shows when it is asked.

    Attributes:
        transport: Its streams, to be entered; those of a server at an address connect then.
        fault: Is told why an answer will not come.
        wait_ended: Returns how it died, once it has.
        is_gone: Whether it has died by now, or as good as: nobody reads what it is sent.
        stderr_tail: What it wrote last to its standard error.
        close: Gives back what beside the streams was taken. Bounded in time.
    """

    transport: Transport
    fault: FirstFailure
    wait_ended: Callable[[], Awaitable[str]] = _wait_forever
    is_gone: Callable[[], bool] = lambda: False
    stderr_tail: Callable[[], str] = str
    close: Callable[[], Awaitable[None]] = _do_nothing
