"""Grading of a submission, and the state of an episode's task."""

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
"""Limits of the interpreters in which submissions run, for everything that the task does not limit."""


class Grader:
    """Grades submissions, each in its own interpreters. Safe to use from many coroutines at once.

    Nothing that a submission does makes it raise; failures are reported in the `Verdict`.

    Args:
        source: the source of interpreters: a started `Sandbox`, or a backend of the environment.
        timeout_reward: the reward of a verdict with the reason "timeout". None keeps it out of a trainer's baseline;
            set a number to train a policy to write fast code.
        fresh_per_case: whether each case gets a fresh interpreter, so that no state carries over between cases.
            Programs ("stdio") and suites always do.
        limits: limits of the interpreters, for everything that the task does not limit.
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
        """Run a submission against the task's cases and return the verdict."""
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
        outcomes = tuple(
            _to_outcome(index, case, results.get(index, _NOT_RUN)) for index, case in enumerate(cases)
        )
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
        """Run the cases in order until one times out.

        Returns:
            The scope of that timeout; None if no case timed out.
        """
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
    first_failure = next(
        outcome for outcome in outcomes if not outcome.passed and outcome.category != "not_run"
    )
    return f"{passed} of {len(outcomes)} cases passed; case {first_failure.index}: {first_failure.category}"


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
    """A submission was made after the task had been solved or its attempts were used up."""


class TaskSession:
    """The task of one episode, with the attempts left and the last verdict."""

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
        """Grade a submission. It does not count as an attempt if the infrastructure failed.

        Raises:
            NoAttemptsLeftError: All attempts are used up, or the task is solved.
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
