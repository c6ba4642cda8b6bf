"""What a check looks at, the ways in which it can come out, and a deadline for what may never come back."""

import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Generic, TypeVar

from openenv_core.errors import ClientError, ConfigurationError, OpenEnvError


class CheckLevel(StrEnum):
    """What a check looks at, from what costs least to what costs most."""

    STATIC = "static"
    RUNTIME = "runtime"
    SEMANTIC = "semantic"
    HOSTILE = "hostile"
    LOAD = "load"


class CheckError(OpenEnvError):
    """The property does not hold.

    Args:
        message: What was expected and what came.
        change: What the author should change.
        cause: What many checks fail of alike, and is told once; the message by default.
    """

    def __init__(self, message: str, *, change: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.change = change
        self.cause = cause or message


def cause_of(error: ClientError) -> str:
    """Return what tells whether two checks met the same error of a server."""
    return f"{type(error).__name__}: {error}"


class CheckWarnedError(OpenEnvError):
    """The property holds as far as it was seen, and is doubtful.

    Args:
        message: What was expected and what came.
        change: What the author should look at.
    """

    def __init__(self, message: str, *, change: str) -> None:
        super().__init__(message)
        self.message = message
        self.change = change


class NotApplicableError(OpenEnvError):
    """The property cannot be looked at here: a URL has no Dockerfile, for one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def needs(package: str, error: ImportError) -> ConfigurationError:
    """Return what tells an author which extra brings an absent package."""
    return ConfigurationError(f"expected the package {package}, got: {error}; pip install 'ropewalk[author]'")


T = TypeVar("T")


class CheckTimeoutError(OpenEnvError):
    """What was run had not ended in time. It may still run, in a thread that the end of the process ends."""


def within(seconds: float, function: Callable[[], T], name: str = "openenv-checker") -> T:
    """Run a function in a thread of its own and return what it returns, or raise what it raises.

    Args:
        seconds: After which it is left to itself.
        function: What to run. It may be anybody's code, so `SystemExit` is caught as well.
        name: Of the thread.

    Raises:
        CheckTimeoutError: It had not ended in time.
    """
    outcome: _Outcome[T] = _Outcome()
    thread = threading.Thread(target=outcome.take, args=(function,), name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise CheckTimeoutError(f"expected an end within {seconds:g} s, got none")
    if outcome.error is not None:
        raise outcome.error
    return outcome.values[0]


class _Outcome(Generic[T]):
    def __init__(self) -> None:
        self.values: list[T] = []
        self.error: BaseException | None = None

    def take(self, function: Callable[[], T]) -> None:
        try:
            self.values.append(function())
        except BaseException as error:
            self.error = error
