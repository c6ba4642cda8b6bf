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
    """How one case ended. A hidden one tells its category and nothing of what was asked, expected or answered.

    Attributes:
        index: its place in the task.
        hidden: whether the policy may not see it.
        passed: whether it passed.
        category: how it ended.
        shown_input: what went in, of a public case.
        expected: what should have come out, of a public case.
        got: what came out, of a public case.
        message: the error in words, of a public case.
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
    """What a submission is worth.

    Attributes:
        reward: 0 to 1; None where it says nothing of the submission, and has to be left out of a baseline.
        reason: "passed" (every case), "failed", "timeout" (a case, or the whole, took too long), or "sandbox_error"
            (the infrastructure failed; the submission may be graded again).
        detail: the reason in words.
        timeout_scope: whether one case took too long or all of them together; None without a time-out.
        cases: one each.
        passed: how many cases passed.
        total: how many cases there are.
        guarantee: "outside": the verdict was made outside the solution's process. "shared": test code ran in one
            process with the solution, which a determined solution can deceive.
        isolation: what the solution ran behind.
        grading_time_s: how long it took.
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
