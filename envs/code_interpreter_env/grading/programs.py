"""Tasks that ask for a program: standard input in, standard output out."""

import math
from collections.abc import Sequence

from .bench import Bench
from .numbers import close, parse_number
from .task import StdioTask
from .trial import PASSED, CaseInfo, Finding, Trial, cut, failure_of


class StdioTrial(Trial):
    """Runs the program in a fresh interpreter for each case."""

    def __init__(self, bench: Bench, code: str, fresh_per_case: bool, task: StdioTask) -> None:
        super().__init__(bench, code, fresh_per_case)
        self._task = task
        self._all = [*task.public, *task.hidden]

    @property
    def cases(self) -> Sequence[CaseInfo]:
        """The runs."""
        public = len(self._task.public)
        return [
            CaseInfo(
                hidden=index >= public,
                weight=case.weight,
                shown_input=cut(case.stdin),
                expected=cut(case.stdout),
            )
            for index, case in enumerate(self._all)
        ]

    async def run(self, index: int) -> Finding:
        """Run the program on one case's input."""
        case = self._all[index]
        await self._bench.fresh()
        execution = await self._bench.execute(self._code, stdin=case.stdin)
        failure = failure_of(execution)
        if failure is not None:
            return failure
        if execution.truncated.stdout:
            return Finding(category="output_limit", message="the program printed more than is kept")
        if output_matches(execution.stdout, case.stdout, self._task.match, self._task.float_tol):
            return PASSED
        return Finding(category="wrong_answer", got=cut(execution.stdout))


def output_matches(got: str, expected: str, match: str, float_tol: float | None) -> bool:
    """Say whether a program printed what it should.

    Args:
        got: what it printed.
        expected: what it should.
        match: "tokens" or "exact".
        float_tol: for numbers with a decimal point or an exponent in the expected output; None: as all words.
    """
    if match == "exact":
        return _lines(got) == _lines(expected)
    words, others = got.split(), expected.split()
    return len(words) == len(others) and all(
        word == other or _near(word, other, float_tol) for word, other in zip(words, others, strict=True)
    )


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").removesuffix("\n")


def _near(word: str, other: str, tolerance: float | None) -> bool:
    if tolerance is None or not any(mark in other for mark in ".eE"):
        return False
    number, expected = parse_number(word), parse_number(other)
    if number is None or expected is None or not math.isfinite(tolerance):
        return False
    return close(number, expected, tolerance, tolerance)
