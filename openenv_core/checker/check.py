"""A check: one named property of an environment."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from openenv_core.checker.outcomes import CheckError, CheckLevel, CheckWarnedError, NotApplicableError
from openenv_core.checker.subject import Subject

__all__ = ["Check", "CheckError", "CheckLevel", "CheckWarnedError", "NotApplicableError", "check"]

PREFIX: Final = "check_"
DEADLINE_S: Final = 120.0
"""Seconds that a check may take, unless it says otherwise."""


@dataclass(frozen=True, slots=True)
class Check:
    """One property. Called with a subject it returns, or raises `CheckError`, `CheckWarnedError`, `NotApplicableError`.

    What it returns, if anything, is a figure or a note that the report shows beside the name.

    Attributes:
        name: What it is called on the command line and in reports: that of its function without `check_`.
        level: What it looks at.
        says: The property, in one sentence.
        deadline_s: Seconds after which it is given up.
        function: What looks.
    """

    name: str
    level: CheckLevel
    says: str
    deadline_s: float
    function: Callable[[Subject], str | None]

    def __call__(self, subject: Subject) -> str | None:
        """Look at the subject, in this thread and without a deadline; `runner.run_check` has one."""
        return self.function(subject)


def check(
    level: CheckLevel, *, deadline_s: float = DEADLINE_S
) -> Callable[[Callable[[Subject], str | None]], Check]:
    """Make a function called `check_...` a check. The first line of its docstring says the property.

    Raises:
        ValueError: Another name, or no docstring.
    """

    def decorate(function: Callable[[Subject], str | None]) -> Check:
        name, doc = function.__name__, inspect.getdoc(function)
        if not name.startswith(PREFIX) or not doc:
            raise ValueError(f"expected a documented function called {PREFIX}..., got {name}")
        return Check(name.removeprefix(PREFIX), level, doc.splitlines()[0], deadline_s, function)

    return decorate
