"""The wire to a tool server, and its errors, none of which leaves the environment as an exception."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mcp.client import Transport

from openenv_core.errors import PicklableError
from openenv_core.tools import ToolErrorType


class UpstreamError(PicklableError):
    """Base class of errors of upstream servers."""


class ServerFailedError(UpstreamError):
    """A tool server did not start or has died; its connection can no longer be used."""


class AddressRefusedError(UpstreamError):
    """A tool server has an address that is not allowed."""


class CallError(UpstreamError):
    """A call failed without a result.

    Attributes:
        error_type: The kind of failure.
        infrastructure: Whether the infrastructure failed, through no fault of the policy.
    """

    def __init__(self, error_type: ToolErrorType, message: str, *, infrastructure: bool = False) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.infrastructure = infrastructure


def unwrap_group(error: BaseException) -> BaseException:
    """Return the first exception inside (nested) exception groups, as the SDK's task groups raise them."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error


def describe_error(error: BaseException) -> str:
    """Return an error's message as a single line of at most 500 characters."""
    cause = unwrap_group(error)
    message = " ".join(str(cause).split())
    return (message or type(cause).__name__)[:500]


class FirstFailure:
    """The first failure since the last `take`."""

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
    """The transport to a server, with hooks for its end. The defaults suit a server at a URL, which has no process.

    Attributes:
        transport: The SDK's transport, a context manager; over HTTP it connects when entered.
        fault: Records why a reply will not come.
        wait_ended: Waits until the server has died, and returns how.
        stderr_tail: Returns the end of the server's standard error.
        close: Releases everything other than the streams, within a bounded time.
    """

    transport: Transport
    fault: FirstFailure
    wait_ended: Callable[[], Awaitable[str]] = _wait_forever
    stderr_tail: Callable[[], str] = str
    close: Callable[[], Awaitable[None]] = _do_nothing
