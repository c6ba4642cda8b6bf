"""A check: one named property of an environment, how it is declared, and which there are."""

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
"""Seconds that a check may take, unless it says otherwise."""

_PREFIX: Final = "check_"

T = TypeVar("T")


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


class CheckWarnedError(CheckError):
    """The property holds as far as it was seen, and is doubtful."""


class NotApplicableError(OpenEnvError):
    """The property cannot be looked at here: a URL has no Dockerfile, for one."""


class CheckTimeoutError(OpenEnvError):
    """What was run had not ended in time. It may still run, in a thread that the end of the process ends."""


@dataclass(frozen=True, slots=True)
class Check:
    """One property.

    Attributes:
        name: What it is called on the command line and in reports: that of its function without `check_`.
        level: What it looks at.
        says: The property, in one sentence.
        deadline_s: Seconds after which it is given up.
        function: Looks at a `Subject`. It returns nothing, or a figure that the report shows beside the name; or it
            raises `CheckError`, `CheckWarnedError` or `NotApplicableError`.
    """

    name: str
    level: CheckLevel
    says: str
    deadline_s: float
    function: Callable[[Any], str | None]


def check(
    level: CheckLevel, *, deadline_s: float = DEADLINE_S
) -> Callable[[Callable[[Any], str | None]], Check]:
    """Make a function called `check_...` a check. The first line of its docstring says the property.

    Raises:
        ValueError: Another name, or no docstring.
    """

    def decorate(function: Callable[[Any], str | None]) -> Check:
        name, doc = function.__name__, inspect.getdoc(function)
        if not name.startswith(_PREFIX) or not doc:
            raise ValueError(f"expected a documented function called {_PREFIX}..., got {name}")
        return Check(name.removeprefix(_PREFIX), level, doc.splitlines()[0], deadline_s, function)

    return decorate


@cache
def checks() -> tuple[Check, ...]:
    """Return all checks: level by level, each a module, as its file has them."""
    modules = [importlib.import_module(f"{__package__}.{level}") for level in CheckLevel]
    return tuple(
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Check) and value.function.__module__ == module.__name__
    )


def select_checks(levels: Iterable[CheckLevel] = (), names: Iterable[str] = ()) -> tuple[Check, ...]:
    """Return the checks of some levels and of some names; all of them where neither is given.

    Raises:
        ConfigurationError: There is no check of that name.
    """
    known = {check.name: check for check in checks()}
    check_names = [name.replace("-", "_").removeprefix(_PREFIX) for name in names]
    for name in check_names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "ropewalk validate --list tells them"
            raise ConfigurationError(f"expected the name of a check, got {name!r}; {hint}")
    at = set(levels)
    if not at and not check_names:
        return checks()
    return tuple(check for check in checks() if check.level in at or check.name in check_names)


def import_package(package: str) -> Any:
    """Import a package that checks work with."""
    with installed_with("author", f"the package {package}"):
        return importlib.import_module(package)


def run_with_timeout(seconds: float, function: Callable[[], T], name: str = "openenv-checker") -> T:
    """Run a function in a thread of its own; returns its result or raises its exception.

    Raises:
        CheckTimeoutError: It had not ended in time.
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
        raise CheckTimeoutError(f"expected an end within {seconds:g} s, got none")
    return values[0]
