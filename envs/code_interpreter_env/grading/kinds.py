"""Trials for each kind of task: a number, a function, a program, or tests that import the submission."""

import ast
import math
import secrets
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Final

from .compare import extract_boxed, is_close, parse_number
from .task import FunctionCase, FunctionTask, NumericTask, StdioTask, SuiteTask, find_tests
from .trial import (
    PASSED,
    CaseInfo,
    CaseResult,
    LoadedTrial,
    Trial,
    describe_value,
    failure_of,
    shorten,
)

_READER: Final = "_read_the_answer"

# Other numbers (Fraction, Decimal, numpy scalars) are read from their `str`.
_READ: Final = f"""
def {_READER}():
    value = {{}}
    return value if type(value) in (int, float, str) else str(value)
"""


class NumericTrial(Trial[NumericTask]):
    """Reads a number from the submission's output, a variable, a function's return value, or the submission's text."""

    @property
    def cases(self) -> Sequence[CaseInfo]:
        """The single, hidden case."""
        return [CaseInfo(hidden=True)]

    async def run(self, index: int) -> CaseResult:
        """Read the number and compare it."""
        text = await self._read_text()
        if isinstance(text, CaseResult):
            return text
        number = parse_number(text)
        if number is None:
            return CaseResult(category="bad_value", message=f"expected a number, got {describe_value(text)}")
        expected = parse_number(str(self._task.answer)) or Fraction(0)
        if is_close(number, expected, self._task.rel_tol, self._task.abs_tol):
            return PASSED
        return CaseResult(category="wrong_answer", got=shorten(text))

    async def _read_text(self) -> str | CaseResult:
        if self._task.answer_from == "text":
            boxed_answer = extract_boxed(self._code)
            return self._code if boxed_answer is None else boxed_answer
        await self._runner.start_fresh()
        execution = await self._runner.execute(self._code)
        failure = failure_of(execution)
        if failure is not None:
            return failure
        if self._task.answer_from == "stdout":
            lines = [line for line in execution.stdout.splitlines() if line.strip()]
            if execution.cut.stdout:
                return CaseResult(category="output_limit", message="it printed more than is kept")
            if not lines:
                return CaseResult(category="missing", message="nothing was printed")
            boxed_answer = extract_boxed(lines[-1])
            return lines[-1] if boxed_answer is None else boxed_answer
        return await self._read_value()

    async def _read_value(self) -> str | CaseResult:
        name = self._task.name
        value = f"{name}()" if self._task.answer_from == "function" else name
        failure = failure_of(await self._runner.execute(_READ.format(value)))
        if failure is not None:
            return failure
        call = await self._runner.call(_READER)
        failure = failure_of(call.execution)
        if failure is None:
            if type(call.value) is float or type(call.value) is int or type(call.value) is str:
                return call.value if type(call.value) is str else describe_value(call.value)
            return CaseResult(category="bad_value", message="expected a number")
        return _to_missing(failure, name)


def _to_missing(failure: CaseResult, name: str) -> CaseResult:
    """Return a failure as "missing" if it is the NameError of the function or variable `name`, else unchanged."""
    if failure.message == f"NameError: name {name!r} is not defined":
        return CaseResult(category="missing", message=failure.message)
    return failure


class FunctionTrial(LoadedTrial[FunctionTask]):
    """Calls the function with each case's arguments; the expected values never leave this process.

    The function gets copies of the arguments, so it cannot change them here.
    """

    @property
    def cases(self) -> Sequence[CaseInfo]:
        """One case per call."""
        return [
            CaseInfo(
                hidden=index >= len(self._task.public),
                shown_input=_format_call(self._task.entry, case),
                expected=describe_value(case.expected),
            )
            for index, case in enumerate(self._task.cases)
        ]

    async def load(self) -> CaseResult | None:
        """Run the submission."""
        await self._runner.start_fresh()
        return failure_of(await self._runner.execute(self._code))

    async def run_loaded(self, index: int) -> CaseResult:
        """Call the function with one case's arguments."""
        case, entry = self._task.cases[index], self._task.entry
        call = await self._runner.call(entry, case.args, case.kwargs)
        failure = failure_of(call.execution)
        if failure is not None:
            return _to_missing(failure, entry)
        if self._task.compare.matches(call.value, case.expected, case.args):
            return PASSED
        return CaseResult(category="wrong_answer", got=describe_value(call.value))


def _format_call(entry: str, case: FunctionCase) -> str:
    keyword_arguments = (f"{key}={describe_value(value)}" for key, value in case.kwargs.items())
    return f"{entry}({', '.join([*map(describe_value, case.args), *keyword_arguments])})"


class StdioTrial(Trial[StdioTask]):
    """Runs the program in a fresh interpreter for each case."""

    @property
    def cases(self) -> Sequence[CaseInfo]:
        """One case per run."""
        return [
            CaseInfo(
                hidden=index >= len(self._task.public),
                shown_input=shorten(case.stdin),
                expected=shorten(case.stdout),
            )
            for index, case in enumerate(self._task.cases)
        ]

    async def run(self, index: int) -> CaseResult:
        """Run the program on one case's input."""
        case = self._task.cases[index]
        await self._runner.start_fresh()
        execution = await self._runner.execute(self._code, stdin=case.stdin)
        failure = failure_of(execution)
        if failure is not None:
            return failure
        if execution.cut.stdout:
            return CaseResult(category="output_limit", message="the program printed more than is kept")
        if _output_matches(execution.stdout, case.stdout, self._task.match, self._task.float_tol):
            return PASSED
        return CaseResult(category="wrong_answer", got=shorten(execution.stdout))


def _output_matches(got: str, expected: str, match: str, float_tol: float | None) -> bool:
    """Return whether a program's output matches. Numbers with a point or an exponent may differ by the tolerance."""
    if match == "exact":
        return _normalize_newlines(got) == _normalize_newlines(expected)
    got_words, expected_words = got.split(), expected.split()
    return len(got_words) == len(expected_words) and all(
        got_word == expected_word or _is_near(got_word, expected_word, float_tol)
        for got_word, expected_word in zip(got_words, expected_words, strict=True)
    )


def _normalize_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").removesuffix("\n")


def _is_near(word: str, other: str, tolerance: float | None) -> bool:
    if tolerance is None or not any(character in other for character in ".eE"):
        return False
    number, expected = parse_number(word), parse_number(other)
    if number is None or expected is None or not math.isfinite(tolerance):
        return False
    return is_close(number, expected, tolerance, tolerance)


_HARNESS: Final = Path(__file__).with_name("suite_harness.py")
_RUN: Final = "_run_one_test"

_LOAD: Final = """
exec(compile({harness!r}, "<tests>", "exec"), globals())
_import_submission({module!r}, {needed!r})
"""


class SuiteTrial(LoadedTrial[SuiteTask]):
    """Imports the submission and calls one test, in a fresh interpreter per test."""

    guarantee = "shared"

    @property
    def cases(self) -> Sequence[CaseInfo]:
        """One case per test."""
        public = len(find_tests(self._task.public))
        return [
            CaseInfo(hidden=index >= public, shown_input=name, expected="no exception")
            for index, (_, name) in enumerate(self._task.cases)
        ]

    async def load(self) -> CaseResult | None:
        """Import the submission while only the harness is in the process."""
        await self._runner.start_fresh({f"{self._task.module}.py": self._code})
        harness = _HARNESS.read_text(encoding="utf-8")
        needed = sorted(_find_imports(self._task.public, self._task.hidden) - {self._task.module})
        code = _LOAD.format(harness=harness, module=self._task.module, needed=needed)
        failure = failure_of(await self._runner.execute(code))
        # Load the harness again: the submission may have rewritten it when it was imported.
        return failure or failure_of(await self._runner.execute(harness))

    async def run_loaded(self, index: int) -> CaseResult:
        """Call one test."""
        self._runner.lost = (
            True  # the next test gets a fresh process, whatever the submission does to this one
        )
        source, name = self._task.cases[index]
        token = secrets.token_hex(16)
        call = await self._runner.call(_RUN, [source, name, token])
        failure = failure_of(call.execution)
        if failure is None:
            if type(call.value) is str and call.value == token[::-1]:
                return PASSED
            return CaseResult(category="error", message="the test did not come to its end")
        error = call.execution.error
        if failure.category == "error" and error is not None and error.ename == "AssertionError":
            return CaseResult(category="wrong_answer", message=failure.message)
        return failure


def _find_imports(*sources: str) -> set[str]:
    """Return the top-level names of the modules that test code imports."""
    names: set[str] = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names
