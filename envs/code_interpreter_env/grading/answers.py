"""Tasks whose answer is one number."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from .bench import Bench
from .numbers import boxed, close, parse_number
from .task import NumericTask
from .trial import PASSED, CaseInfo, Finding, Trial, cut, failure_of, shown

_READER: Final = "_read_the_answer"

# What is no builtin number (a Fraction, a Decimal, numpy's) is taken by its text.
_READ: Final = f"""
def {_READER}():
    value = {{}}
    return value if type(value) in (int, float, str) else str(value)
"""


class NumericTrial(Trial):
    """Reads a number from what the submission printed, assigned, returned, or from the submission itself."""

    def __init__(self, bench: Bench, code: str, fresh_per_case: bool, task: NumericTask) -> None:
        super().__init__(bench, code, fresh_per_case)
        self._task = task

    @property
    def cases(self) -> Sequence[CaseInfo]:
        """The one number, which is hidden."""
        return [CaseInfo(hidden=True)]

    async def run(self, index: int) -> Finding:
        """Find the number and compare it."""
        found = await self._text()
        if isinstance(found, Finding):
            return found
        number = parse_number(found)
        if number is None:
            return Finding(category="bad_value", message=f"expected a number, got {shown(found)}")
        expected = parse_number(str(self._task.answer)) or Fraction(0)
        if close(number, expected, self._task.rel_tol, self._task.abs_tol):
            return PASSED
        return Finding(category="wrong_answer", got=cut(found))

    async def _text(self) -> str | Finding:
        if self._task.answer_from == "text":
            marked = boxed(self._code)
            return self._code if marked is None else marked
        await self._bench.fresh()
        execution = await self._bench.execute(self._code)
        failure = failure_of(execution)
        if failure is not None:
            return failure
        if self._task.answer_from == "stdout":
            lines = [line for line in execution.stdout.splitlines() if line.strip()]
            if execution.truncated.stdout:
                return Finding(category="output_limit", message="it printed more than is kept")
            if not lines:
                return Finding(category="missing", message="nothing was printed")
            marked = boxed(lines[-1])
            return lines[-1] if marked is None else marked
        return await self._value()

    async def _value(self) -> str | Finding:
        name = self._task.name
        value = f"{name}()" if self._task.answer_from == "function" else name
        failure = failure_of(await self._bench.execute(_READ.format(value)))
        if failure is not None:
            return failure
        call = await self._bench.call(_READER)
        failure = failure_of(call.execution)
        if failure is None:
            if type(call.value) is float or type(call.value) is int or type(call.value) is str:
                return call.value if type(call.value) is str else shown(call.value)
            return Finding(category="bad_value", message="expected a number")
        if failure.message == f"NameError: name {name!r} is not defined":
            return Finding(category="missing", message=failure.message)
        return failure
