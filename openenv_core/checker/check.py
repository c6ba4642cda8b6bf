"""Checks: declaring the named properties of an environment, and selecting them."""

import difflib
import importlib
import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final, TypeVar

from openenv_core.errors import ConfigurationError, OpenEnvError, installed_with

DEADLINE_S: Final = 120.0
"""Seconds that a check may take by default."""

_PREFIX: Final = "check_"

T = TypeVar("T")


class CheckLevel(StrEnum):
    """The level of a check, from the cheapest to the most expensive."""

    STATIC = "static"
    RUNTIME = "runtime"
    SEMANTIC = "semantic"
    LOAD = "load"


class CheckError(OpenEnvError):
    """The property does not hold.

    Args:
        message: What was expected, and what happened instead.
        change: What the author should change.
        cause: Identifies failures with a common cause, which is reported once; the message by default.
    """

    def __init__(self, message: str, *, change: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.change = change
        self.cause = cause or message


class CheckWarnedError(CheckError):
    """The property is doubtful, although no violation was seen."""


class NotApplicableError(OpenEnvError):
    """The property cannot be checked for this target: a URL has no Dockerfile, for example."""


class CheckTimeoutError(OpenEnvError):
    """A function has not returned in time. It may still run, in a thread that ends with the process."""


@dataclass(frozen=True, slots=True)
class Check:
    """One property of an environment.

    Attributes:
        name: Its name on the command line and in reports: that of the function without `check_`.
        level: Its level.
        description: The property, in one sentence.
        deadline_s: Seconds after which it is aborted.
        function: Checks a `Subject`. Returns None, or a note that the report shows beside the name; raises
            `CheckError`, `CheckWarnedError` or `NotApplicableError`.
    """

    name: str
    level: CheckLevel
    description: str
    deadline_s: float
    function: Callable[[Any], str | None]


def check(
    level: CheckLevel, *, deadline_s: float = DEADLINE_S
) -> Callable[[Callable[[Any], str | None]], Check]:
    """Make a function named `check_...` a check. The first line of its docstring states the property.

    Raises:
        ValueError: The function has another name, or no docstring.
    """

    def decorate(function: Callable[[Any], str | None]) -> Check:
        name, doc = function.__name__, inspect.getdoc(function)
        if not name.startswith(_PREFIX) or not doc:
            raise ValueError(f"expected a documented function called {_PREFIX}..., got {name}")
        return Check(name.removeprefix(_PREFIX), level, doc.splitlines()[0], deadline_s, function)

    return decorate


@cache
def checks() -> tuple[Check, ...]:
    """Return all checks by level, in the order of each level's module."""
    modules = [importlib.import_module(f"{__package__}.{level}") for level in CheckLevel]
    return tuple(
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Check) and value.function.__module__ == module.__name__
    )


def select_checks(levels: Iterable[CheckLevel] = (), names: Iterable[str] = ()) -> tuple[Check, ...]:
    """Return the checks with one of these levels or names; all if neither is given.

    Raises:
        ConfigurationError: There is no check of that name.
    """
    known = {check.name: check for check in checks()}
    check_names = [name.replace("-", "_").removeprefix(_PREFIX) for name in names]
    for name in check_names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "`ropewalk validate --list` shows them"
            raise ConfigurationError(f"expected the name of a check, got {name!r}; {hint}")
    at = set(levels)
    if not at and not check_names:
        return checks()
    return tuple(check for check in checks() if check.level in at or check.name in check_names)


def import_package(package: str) -> Any:
    """Import a package of the `author` extra."""
    with installed_with("author", f"the package {package}"):
        return importlib.import_module(package)


def run_with_timeout(seconds: float, function: Callable[[], T], name: str = "openenv-checker") -> T:
    """Run a function in a new thread; return its result or raise its exception.

    Raises:
        CheckTimeoutError: It has not returned in time.
    """
    values: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not values:
        raise CheckTimeoutError(f"expected a result within {seconds:g} s, got none")
    return values[0]
