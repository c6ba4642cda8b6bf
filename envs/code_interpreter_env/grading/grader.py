"""From a submission to its verdict, and the task that is being worked on."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from openenv_core.sandbox import Limits

from .kinds import FunctionTrial, NumericTrial, StdioTrial, SuiteTrial
from .task import FunctionTask, NumericTask, Scoring, StdioTask, SuiteTask, Task, public_view
from .trial import (
    CaseInfo,
    CaseResult,
    GradingUnavailableError,
    Opens,
    OutOfTimeError,
    SubmissionRunner,
    Trial,
    reward_of,
)
from .verdict import CaseOutcome, Reason, Scope, Verdict

DEFAULT_LIMITS = Limits(outputs_bytes=1 << 20)
"""Of the interpreters in which submissions run, where a task says nothing."""


class Grader:
    """Grades submissions, each in interpreters of its own. Safe to use from many coroutines at once.

    Nothing that a submission does raises here. What it may do instead is in `Verdict`.

    Args:
        source: where interpreters come from: a started `Sandbox`, or a backend of the environment.
        scoring: how cases become a reward; None: as each task says.
        timeout_reward: the reward of a verdict with the reason "timeout". None keeps it out of a trainer's baseline;
            a number is for those who would rather teach a policy to be quick.
        fresh_per_case: begins every case with a fresh interpreter, so that nothing can be kept from one to the next.
            Programs ("stdio") and suites always do.
        shuffle: the cases of each grading in an order of their own.
        stop_early: ends at the first case that fails where the scoring is "all_or_nothing"; the rest is "not_run".
        limits: of the interpreters, where a task says nothing.
    """

    def __init__(
        self,
        source: Opens,
        *,
        scoring: Scoring | None = None,
        timeout_reward: float | None = None,
        fresh_per_case: bool = False,
        shuffle: bool = False,
        stop_early: bool = False,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        if timeout_reward is not None and not 0 <= timeout_reward <= 1:
            raise ValueError(f"expected a timeout_reward from 0 to 1, or None, got {timeout_reward!r}")
        self._source = source
        self._scoring = scoring
        self._timeout_reward = timeout_reward
        self._fresh_per_case = fresh_per_case
        self._order = random.SystemRandom() if shuffle else None
        self._stop_early = stop_early
        self._limits = limits

    async def grade(self, task: Task, code: str) -> Verdict:
        """Return what a submission is worth.

        Args:
            task: the task, with its hidden half.
            code: the submission.
        """
        began = time.perf_counter()
        bench = SubmissionRunner(self._source, task, self._limits)
        trial = _trial(bench, task, code, self._fresh_per_case)
        try:
            run = await self._run(trial, bench, self._scoring or task.scoring)
        finally:
            await bench.close()
        return self._verdict(trial, bench, run, self._scoring or task.scoring, time.perf_counter() - began)

    async def _run(self, trial: Trial, bench: SubmissionRunner, scoring: Scoring) -> "_Run":
        run = _Run()
        order = list(range(len(trial.cases)))
        if self._order is not None:
            self._order.shuffle(order)
        for index in order:
            try:
                finding = await trial.run(index)
            except GradingUnavailableError as error:
                run.unavailable = str(error)
                break
            except OutOfTimeError:
                run.scope = "total"
                break
            run.findings[index] = finding
            if finding.category == "timeout":
                run.scope = bench.scope
                break
            if self._stop_early and scoring == "all_or_nothing" and finding.category != "passed":
                break
        return run

    def _verdict(
        self, trial: Trial, bench: SubmissionRunner, run: "_Run", scoring: Scoring, took: float
    ) -> Verdict:
        cases = trial.cases
        not_run = CaseResult(category="not_run")
        outcomes = tuple(_outcome(at, case, run.findings.get(at, not_run)) for at, case in enumerate(cases))
        reason, detail = run.reason(outcomes)
        reward: float | None
        if reason == "sandbox_error":
            reward = None
        elif reason == "timeout":
            reward = self._timeout_reward
        else:
            reward = reward_of(scoring, cases, [outcome.passed for outcome in outcomes])
        return Verdict(
            reward=reward,
            reason=reason,
            detail=detail,
            timeout_scope=run.scope if reason == "timeout" else None,
            cases=outcomes,
            passed=sum(outcome.passed for outcome in outcomes),
            total=len(outcomes),
            guarantee=trial.guarantee,
            isolation=bench.isolation,
            grading_time_s=took,
        )


@dataclass(slots=True)
class _Run:
    """How far a grading came.

    Attributes:
        findings: of the cases that ended, by index.
        scope: what took too long, if anything did.
        unavailable: what the infrastructure said when it failed.
    """

    findings: dict[int, CaseResult] = field(default_factory=dict)
    scope: Scope | None = None
    unavailable: str | None = None

    def reason(self, outcomes: Sequence[CaseOutcome]) -> tuple[Reason, str]:
        """Return the verdict's reason, and the words for it."""
        if self.unavailable is not None:
            return "sandbox_error", f"the sandbox failed: {self.unavailable}"
        if self.scope == "case":
            return "timeout", "a case took longer than it may"
        if self.scope == "total":
            return "timeout", "all cases together took longer than they may"
        passed = sum(outcome.passed for outcome in outcomes)
        if passed == len(outcomes):
            return "passed", "every case passed"
        first = next(outcome for outcome in outcomes if not outcome.passed and outcome.category != "not_run")
        return "failed", f"{passed} of {len(outcomes)} cases passed; case {first.index}: {first.category}"


def _outcome(index: int, case: CaseInfo, finding: CaseResult) -> CaseOutcome:
    passed = finding.category == "passed"
    if case.hidden:
        return CaseOutcome(index=index, hidden=True, passed=passed, category=finding.category)
    return CaseOutcome(
        index=index,
        hidden=False,
        passed=passed,
        category=finding.category,
        shown_input=case.shown_input,
        expected=case.expected,
        got=finding.got,
        message=finding.message,
    )


def _trial(bench: SubmissionRunner, task: Task, code: str, fresh_per_case: bool) -> Trial:
    match task:
        case FunctionTask():
            return FunctionTrial(bench, code, fresh_per_case, task)
        case StdioTask():
            return StdioTrial(bench, code, fresh_per_case, task)
        case NumericTask():
            return NumericTrial(bench, code, fresh_per_case, task)
        case SuiteTask():
            return SuiteTrial(bench, code, fresh_per_case, task)
    assert_never(task)


class NoAttemptsLeftError(ValueError):
    """Every submission that the task takes was made."""


class TaskSession:
    """One episode's task.

    Args:
        task: the task, with its hidden half.
        grader: what submissions are graded by.
    """

    def __init__(self, task: Task, grader: Grader) -> None:
        self._task = task
        self._grader = grader
        self._left = task.attempts
        self.verdict: Verdict | None = None
        """Of the last submission."""

    @property
    def prompt(self) -> str:
        """The task in words."""
        return self._task.prompt

    @property
    def view(self) -> dict[str, object]:
        """All that a client may see of the task."""
        return public_view(self._task)

    @property
    def files(self) -> dict[str, bytes]:
        """What belongs into the workspace of the episode's interpreter."""
        return {path: content.encode() for path, content in self._task.files.items()}

    @property
    def starter(self) -> str:
        """Code to begin with."""
        return self._task.starter

    @property
    def attempts_left(self) -> int:
        """How many submissions are left."""
        return self._left

    @property
    def done(self) -> bool:
        """Whether the episode is over: every case passed, or no attempt is left."""
        return self._left == 0 or (self.verdict is not None and self.verdict.reason == "passed")

    async def submit(self, code: str) -> Verdict:
        """Grade a submission, in interpreters of its own. One that the infrastructure failed is not counted.

        Raises:
            NoAttemptsLeftError: Every attempt was used, or the task is solved.
        """
        if self.done:
            raise NoAttemptsLeftError(
                "expected a submission before the end of the task, got one after it; reset first"
            )
        self._left -= 1
        verdict: Verdict | None = None
        try:
            verdict = await self._grader.grade(self._task, code)
        finally:
            if verdict is None or verdict.reason == "sandbox_error":
                self._left += 1
        self.verdict = verdict
        return verdict
