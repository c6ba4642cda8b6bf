"""The result of grading a submission, in a form that may be shown to the policy."""

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

Category: TypeAlias = Literal[
    "passed",
    "wrong_answer",
    "error",
    "missing",
    "bad_value",
    "timeout",
    "memory",
    "output_limit",
    "killed",
    "not_run",
]
"""How a case ended: `error` is an exception, `missing` an undefined function or variable, `bad_value` an answer that
is too large or of a type that cannot be transferred, `killed` the end of the interpreter, and `not_run` a case after
the one that ended the grading."""

Reason: TypeAlias = Literal["passed", "failed", "timeout", "sandbox_error"]
Scope: TypeAlias = Literal["case", "total"]


class CaseOutcome(BaseModel):
    """The result of one case. For a hidden case it reveals only the category, not the input, expected value or answer.

    Attributes:
        index: the index of the case in the task.
        hidden: whether the case is hidden from the policy.
        passed: whether the case passed.
        category: how the case ended.
        shown_input: the input of a public case.
        expected: the expected value of a public case.
        got: the actual value of a public case.
        message: the error message of a public case.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: int
    hidden: bool
    passed: bool
    category: Category
    shown_input: str | None = None
    expected: str | None = None
    got: str | None = None
    message: str | None = None


class Verdict(BaseModel):
    """The result of grading a submission.

    Attributes:
        reward: 0 to 1; None if it does not reflect the submission and must be left out of a baseline.
        reason: "passed" (every case), "failed", "timeout" (of a case or of the whole grading), or "sandbox_error"
            (the infrastructure failed; the submission may be graded again).
        detail: a message that explains the reason.
        timeout_scope: whether one case or the whole grading timed out; None without a timeout.
        cases: the outcome of each case.
        passed: the number of cases that passed.
        total: the number of cases.
        guarantee: "outside": the verdict was determined outside the solution's process. "shared": test code shared a
            process with the solution, so a determined solution could deceive it.
        isolation: the isolation level that the solution ran at.
        grading_time_s: the duration of the grading in seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    reward: float | None
    reason: Reason
    detail: str
    timeout_scope: Scope | None = None
    cases: tuple[CaseOutcome, ...] = ()
    passed: int = 0
    total: int = 0
    guarantee: Literal["outside", "shared"] = "outside"
    isolation: str = ""
    grading_time_s: float = 0.0
