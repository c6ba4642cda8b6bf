"""Running a submission for grading: its interpreters, calls of its functions, and the results of cases."""

import inspect
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Literal, Protocol, TypeVar, cast, runtime_checkable

from openenv_core.errors import OpenEnvError
from openenv_core.sandbox import CodeError, Execution, FunctionCall, Interpreter, Limits, values
from openenv_core.sandbox.results import EXIT_ERROR
from openenv_core.sandbox.values import NotPlainError, dumps, loads

from .task import BaseTask, Scoring
from .verdict import Category, Scope

NOT_PLAIN: Final = "NotPlainError"
"""The name of the error of a function whose return value cannot be transferred out of the interpreter."""

_HELPER: Final = "_values_for_calls"

_INSTALL: Final = f"""
import sys as _s, types as _t
_m = _t.ModuleType({_HELPER!r})
_s.modules[{_HELPER!r}] = _m
exec(compile({inspect.getsource(values)!r}, {_HELPER!r}, "exec"), _m.__dict__)
del _s, _t, _m
"""

# A single expression statement, so that it adds no names to the submission's namespace.
_CALL: Final = """
(lambda values, function, args, kwargs: print(
    "\\n" + {marker!r} + values.dumps(function(*args, **kwargs), max_bytes={room}).decode() + "\\n" + {marker!r}
))(
    __import__("sys").modules[{helper!r}],
    {function},
    __import__("sys").modules[{helper!r}].loads({args!r}),
    __import__("sys").modules[{helper!r}].loads({kwargs!r}),
)
"""


@runtime_checkable
class FunctionCaller(Protocol):
    """An interpreter that can call functions, as those of our own sandbox can."""

    async def call(
        self,
        function: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> FunctionCall:
        """Call a function that the code defined."""


async def _call_function(
    interpreter: Interpreter,
    function: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    timeout_s: float,
) -> FunctionCall:
    """Call a function that was defined in an interpreter.

    On an interpreter that can only run code, the call is sent as code that prints the return value as tagged JSON
    behind a random marker. The output is trusted no more than a return value: forging it is the same as returning it.
    """
    if isinstance(interpreter, FunctionCaller):
        return await cast(FunctionCaller, interpreter).call(function, args, kwargs, timeout_s=timeout_s)
    installation = await interpreter.execute(_INSTALL, timeout_s=timeout_s)
    if installation.status != "ok":
        return FunctionCall(execution=installation)
    marker = secrets.token_hex(16)
    code = _CALL.format(
        marker=marker,
        helper=_HELPER,
        function=function,
        room=48 << 10,  # below the default limit of 64 KiB for standard output
        args=dumps(list(args)),
        kwargs=dumps(dict(kwargs)),
    )
    execution = await interpreter.execute(code, timeout_s=timeout_s)
    if execution.status != "ok":
        return FunctionCall(execution=execution)
    parts = execution.stdout.rsplit(marker, 2)
    with suppress(NotPlainError):
        if len(parts) == 3:
            return FunctionCall(execution=execution, value=loads(parts[1].encode()))
    error = CodeError(ename=NOT_PLAIN, evalue="no answer was found in what was printed")
    return FunctionCall(execution=replace(execution, status="error", exit_code=EXIT_ERROR, error=error))


class InterpreterSource(Protocol):
    """A source of interpreters: a `Sandbox`, or a backend of the environment."""

    async def open(self, limits: Limits) -> Interpreter:
        """Start an interpreter."""


class GradingUnavailableError(Exception):
    """The infrastructure failed, through no fault of the submission."""


class OutOfTimeError(Exception):
    """The time limit of the whole grading has passed."""


@contextmanager
def _convert_infrastructure_errors() -> Iterator[None]:
    try:
        yield
    except (OpenEnvError, OSError) as error:
        raise GradingUnavailableError(str(error)) from error


class SubmissionRunner:
    """Runs a submission in an interpreter. Infrastructure failures are raised as `GradingUnavailableError`.

    Attributes:
        lost: whether the interpreter's state is gone, so that the submission has to be run again.
        isolation: the isolation level of the interpreter; empty before the first one starts.
    """

    def __init__(self, source: InterpreterSource, task: BaseTask, limits: Limits) -> None:
        self._source = source
        self._task = task
        self._limits = task.limits.apply_to(limits)
        self._interpreter: Interpreter | None = None
        self._deadline = time.monotonic() + task.limits.total_s
        self._granted_s = self._limits.timeout_s
        self.lost = True
        self.isolation = ""

    @property
    def scope(self) -> Scope:
        """Which limit bounded the last execution: the timeout of a case, or the time left in total."""
        return "case" if self._granted_s >= self._limits.timeout_s else "total"

    async def start_fresh(self, more_files: Mapping[str, str] | None = None) -> None:
        """Start or restart the interpreter with the task's files and any further ones."""
        self._grant_time_s()
        with _convert_infrastructure_errors():
            if self._interpreter is None:
                self._interpreter = await self._source.open(self._limits)
                self.isolation = self._interpreter.isolation
            else:
                await self._interpreter.restart()
            for path, content in {**self._task.files, **(more_files or {})}.items():
                await self._interpreter.put_file(path, content.encode())
        self.lost = False

    async def execute(self, code: str, stdin: str | None = None) -> Execution:
        """Run code within the time limits of the case and of the whole grading."""
        with _convert_infrastructure_errors():
            assert self._interpreter is not None  # start_fresh() comes first
            execution = await self._interpreter.execute(code, timeout_s=self._grant_time_s(), stdin=stdin)
        return self._check_sandbox(execution)

    async def call(
        self, function: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> FunctionCall:
        """Call a function that the submission defined, within the same time limits."""
        with _convert_infrastructure_errors():
            assert self._interpreter is not None
            left_s = self._grant_time_s()
            call = await _call_function(self._interpreter, function, args, kwargs or {}, timeout_s=left_s)
        self._check_sandbox(call.execution)
        return call

    async def close(self) -> None:
        """Close the interpreter."""
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            with suppress(
                OpenEnvError, OSError
            ):  # the verdict is already known, and the source cleans up its interpreters
                await interpreter.close()

    def _grant_time_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise OutOfTimeError
        self._granted_s = min(left_s, self._limits.timeout_s)
        return self._granted_s

    def _check_sandbox(self, execution: Execution) -> Execution:
        if execution.status == "sandbox_error":
            raise GradingUnavailableError(execution.reason or "the sandbox failed")
        self.lost = self.lost or execution.state_lost
        return execution


SHOWN_CHARS: Final = 2000
"""The maximum length of each text that a public case shows: input, answers and messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseInfo:
    """A case as the grader sees it, whatever the kind of task."""

    hidden: bool
    shown_input: str = ""
    expected: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """How a case ended."""

    category: Category
    got: str | None = None
    message: str | None = None


PASSED: Final = CaseResult(category="passed")


TaskT = TypeVar("TaskT", bound=BaseTask)


class Trial(ABC, Generic[TaskT]):
    """One submission to one task."""

    guarantee: Literal["outside", "shared"] = "outside"

    def __init__(self, runner: SubmissionRunner, task: TaskT, code: str) -> None:
        self._runner = runner
        self._task = task
        self._code = code

    @property
    @abstractmethod
    def cases(self) -> Sequence[CaseInfo]:
        """The cases, in the task's order, public ones first."""

    @abstractmethod
    async def run(self, index: int) -> CaseResult:
        """Run one case.

        Raises:
            GradingUnavailableError: The infrastructure failed.
            OutOfTimeError: The time limit of the whole grading has passed.
        """


class LoadedTrial(Trial[TaskT]):
    """A trial that runs the submission once for all cases, and again only if the interpreter's state was lost."""

    async def run(self, index: int) -> CaseResult:
        """Run one case, after running the submission if necessary."""
        if self._runner.lost:
            failure = await self.load()
            if failure is not None:
                self._runner.lost = True  # never run cases on a half-loaded submission
                return failure
        return await self.run_loaded(index)

    @abstractmethod
    async def load(self) -> CaseResult | None:
        """Run the submission in a fresh interpreter; return the failure, if any."""

    @abstractmethod
    async def run_loaded(self, index: int) -> CaseResult:
        """Run one case of the loaded submission."""


def failure_of(execution: Execution) -> CaseResult | None:
    """Return the failure of an execution; None if it succeeded."""
    if execution.status == "ok":
        return None
    assert execution.status != "sandbox_error"  # the runner raises on these
    if execution.status != "error":
        return CaseResult(category=execution.status, message=execution.reason)
    error = execution.error
    if error is None:
        return CaseResult(category="error", message=execution.reason)
    message = f"{error.ename}: {error.evalue}"[:SHOWN_CHARS]
    return CaseResult(category="bad_value" if error.ename == NOT_PLAIN else "error", message=message)


def describe_value(value: Any) -> str:
    """Return the shortened `repr` of a value of builtin types."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts to text
        text = "<an integer of very many digits>"
    return shorten(text)


def shorten(text: str) -> str:
    """Return a text, truncated to `SHOWN_CHARS`."""
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def reward_of(scoring: Scoring, cases: Sequence[CaseInfo], passed: Sequence[bool]) -> float:
    """Return the reward, 0 to 1.

    Partial credit counts only hidden cases, if any: the answers of public ones can be copied from the prompt. A full
    reward of 1 still requires every case to pass.
    """
    if all(passed):
        return 1.0
    if scoring == "all_or_nothing":
        return 0.0
    scored_indices = [index for index, case in enumerate(cases) if case.hidden] or list(range(len(cases)))
    share = sum(passed[index] for index in scored_indices) / len(scored_indices)
    # Some case failed. If only public ones did, the share is 1, so cap it about one case's share below that.
    return min(share, 1.0 - 1.0 / (len(cases) + 1))
