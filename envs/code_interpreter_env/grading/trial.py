"""What every kind of task answers the grader with: its cases, and how each of them ended."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from openenv_core.sandbox import Execution

from .bench import Bench
from .calls import NOT_PLAIN
from .verdict import Category

SHOWN_CHARS: Final = 2000
"""Of what a public case tells: input, answers and messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseInfo:
    """A case as the grader sees it.

    Attributes:
        hidden: whether the policy may see nothing of it.
        weight: its share of the credit.
        shown_input: its input in words.
        expected: its answer in words.
    """

    hidden: bool
    weight: float = 1.0
    shown_input: str = ""
    expected: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How a case ended.

    Attributes:
        category: the verdict of the case.
        got: the answer in words.
        message: the error in words.
    """

    category: Category
    got: str | None = None
    message: str | None = None


PASSED: Final = Finding(category="passed")


class Trial(ABC):
    """One submission before one task.

    Args:
        bench: where it runs.
        code: the submission.
        fresh_per_case: whether nothing of one case is there in the next.
    """

    guarantee: Any = "outside"

    def __init__(self, bench: Bench, code: str, fresh_per_case: bool) -> None:
        self._bench = bench
        self._code = code
        self._fresh_per_case = fresh_per_case

    @property
    @abstractmethod
    def cases(self) -> Sequence[CaseInfo]:
        """The cases, in the task's order, public ones first."""

    @abstractmethod
    async def run(self, index: int) -> Finding:
        """Run one case.

        Raises:
            Unavailable: The infrastructure failed.
            OutOfTime: There is no time left.
        """


class LoadedTrial(Trial):
    """A trial whose submission is run once and then asked case by case; again only where its interpreter ended."""

    async def run(self, index: int) -> Finding:
        """Run one case, and the submission before it where need be."""
        if self._bench.lost or self._fresh_per_case:
            failure = await self.load()
            if failure is not None:
                self._bench.lost = True  # nothing half-loaded is asked
                return failure
        return await self.ask(index)

    @abstractmethod
    async def load(self) -> Finding | None:
        """Run the submission in a fresh interpreter; return how that failed, if it did."""

    @abstractmethod
    async def ask(self, index: int) -> Finding:
        """Run one case of a submission that was loaded."""


def failure_of(execution: Execution) -> Finding | None:
    """Return how an execution failed; None where it did not."""
    if execution.status == "ok":
        return None
    if execution.status == "sandbox_error":
        raise ValueError("expected the bench to have told this from what code does")
    if execution.status != "error":
        return Finding(category=execution.status, message=execution.reason)
    error = execution.error
    if error is None:
        return Finding(category="error", message=execution.reason)
    message = f"{error.ename}: {error.evalue}"[:SHOWN_CHARS]
    return Finding(category="bad_value" if error.ename == NOT_PLAIN else "error", message=message)


def shown(value: Any) -> str:
    """Return a value of builtin types in words, not too many."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python likes to print
        text = "<an integer of very many digits>"
    return cut(text)


def cut(text: str) -> str:
    """Return a text, or its beginning where it is long."""
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
