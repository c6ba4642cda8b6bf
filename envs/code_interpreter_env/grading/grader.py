"""From a submission to its verdict, and the task that is being worked on."""

import time
from collections.abc import Sequence
from typing import Any, Final, assert_never

from openenv_core.sandbox import Limits

from .kinds import FunctionTrial, NumericTrial, StdioTrial, SuiteTrial
from .task import FunctionTask, NumericTask, StdioTask, SuiteTask, Task
from .trial import (
    CaseInfo,
    CaseResult,
    GradingUnavailableError,
    InterpreterSource,
    OutOfTimeError,
    SubmissionRunner,
    Trial,
    reward_of,
)
from .verdict import CaseOutcome, Scope, Verdict

DEFAULT_LIMITS = Limits(outputs_bytes=1 << 20)
"""Of the interpreters in which submissions run, where a task says nothing."""


class Grader:
    """Grades submissions, each in interpreters of its own. Safe to use from many coroutines at once.

    Nothing that a submission does raises here. What it may do instead is in `Verdict`.

    Args:
        source: where interpreters come from: a started `Sandbox`, or a backend of the environment.
        timeout_reward: the reward of a verdict with the reason "timeout". None keeps it out of a trainer's baseline;
            a number is for those who would rather teach a policy to be quick.
        fresh_per_case: begins every case with a fresh interpreter, so that nothing can be kept from one to the next.
            Programs ("stdio") and suites always do.
        limits: of the interpreters, where a task says nothing.
    """

    def __init__(
        self,
        source: InterpreterSource,
        *,
        timeout_reward: float | None = None,
        fresh_per_case: bool = False,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        if timeout_reward is not None and not 0 <= timeout_reward <= 1:
            raise ValueError(f"expected a timeout_reward from 0 to 1, or None, got {timeout_reward!r}")
        self._source = source
        self._timeout_reward = timeout_reward
        self._fresh_per_case = fresh_per_case
        self._limits = limits

    async def grade(self, task: Task, code: str) -> Verdict:
        """Return what a submission is worth."""
        start = time.perf_counter()
        runner = SubmissionRunner(self._source, task, self._limits)
        trial = _make_trial(runner, task, code)
        results: dict[int, CaseResult] = {}
        scope: Scope | None = None
        failure: str | None = None
        try:
            scope = await self._run_cases(trial, runner, results)
        except GradingUnavailableError as error:
            failure = str(error)
        except OutOfTimeError:
            scope = "total"
        finally:
            await runner.close()
        cases = trial.cases
        outcomes = tuple(_to_outcome(at, case, results.get(at, _NOT_RUN)) for at, case in enumerate(cases))
        passed = [outcome.passed for outcome in outcomes]
        reward: float | None = None
        if failure is not None:
            scope = None
            reason, detail = "sandbox_error", f"the sandbox failed: {failure}"
        elif scope is not None:
            reason, detail, reward = "timeout", _TIMEOUTS[scope], self._timeout_reward
        else:
            reward = reward_of(task.scoring, cases, passed)
            reason, detail = (
                ("passed", "every case passed") if all(passed) else ("failed", _first_failure(outcomes))
            )
        return Verdict(
            reward=reward,
            reason=reason,
            detail=detail,
            timeout_scope=scope,
            cases=outcomes,
            passed=sum(passed),
            total=len(outcomes),
            guarantee=trial.guarantee,
            isolation=runner.isolation,
            grading_time_s=time.perf_counter() - start,
        )

    async def _run_cases(
        self, trial: Trial[Any], runner: SubmissionRunner, results: dict[int, CaseResult]
    ) -> Scope | None:
        """Run case after case, until one takes too long; return what that means."""
        for index in range(len(trial.cases)):
            runner.lost = runner.lost or self._fresh_per_case
            results[index] = result = await trial.run(index)
            if result.category == "timeout":
                return runner.scope
        return None


_NOT_RUN: Final = CaseResult(category="not_run")
_TIMEOUTS: Final[dict[Scope, str]] = {
    "case": "a case took longer than it may",
    "total": "all cases together took longer than they may",
}


def _first_failure(outcomes: Sequence[CaseOutcome]) -> str:
    passed = sum(outcome.passed for outcome in outcomes)
    first = next(outcome for outcome in outcomes if not outcome.passed and outcome.category != "not_run")
    return f"{passed} of {len(outcomes)} cases passed; case {first.index}: {first.category}"


def _to_outcome(index: int, case: CaseInfo, result: CaseResult) -> CaseOutcome:
    details = {
        "shown_input": case.shown_input,
        "expected": case.expected,
        "got": result.got,
        "message": result.message,
    }
    return CaseOutcome(
        index=index,
        hidden=case.hidden,
        passed=result.category == "passed",
        category=result.category,
        **({} if case.hidden else details),
    )


def _make_trial(runner: SubmissionRunner, task: Task, code: str) -> Trial[Any]:
    match task:
        case FunctionTask():
            return FunctionTrial(runner, task, code)
        case StdioTask():
            return StdioTrial(runner, task, code)
        case NumericTask():
            return NumericTrial(runner, task, code)
        case SuiteTask():
            return SuiteTrial(runner, task, code)
    assert_never(task)


class NoAttemptsLeftError(ValueError):
    """Every submission that the task takes was made."""


class TaskSession:
    """One episode's task."""

    def __init__(self, task: Task, grader: Grader) -> None:
        self.task = task
        self._grader = grader
        self.attempts_left = task.attempts
        self.verdict: Verdict | None = None

    @property
    def done(self) -> bool:
        """Whether the episode is over: every case passed, or no attempt is left."""
        return self.attempts_left == 0 or (self.verdict is not None and self.verdict.reason == "passed")

    async def submit(self, code: str) -> Verdict:
        """Grade a submission, in interpreters of its own. One that the infrastructure failed is not counted.

        Raises:
            NoAttemptsLeftError: Every attempt was used, or the task is solved.
        """
        if self.done:
            raise NoAttemptsLeftError(
                "expected a submission before the task has ended, got one after; reset first"
            )
        self.attempts_left -= 1
        verdict: Verdict | None = None
        try:
            verdict = await self._grader.grade(self.task, code)
        finally:
            if verdict is None or verdict.reason == "sandbox_error":
                self.attempts_left += 1
        self.verdict = verdict
        return verdict
