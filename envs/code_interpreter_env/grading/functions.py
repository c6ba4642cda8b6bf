"""Tasks that ask for a function."""

from collections.abc import Sequence

from .bench import Bench
from .task import FunctionTask
from .trial import PASSED, CaseInfo, Finding, LoadedTrial, failure_of, shown


class FunctionTrial(LoadedTrial):
    """Calls the function; the expected values never leave this process.

    Arguments are copies by nature, so a function that changes them changes nothing here.
    """

    def __init__(self, bench: Bench, code: str, fresh_per_case: bool, task: FunctionTask) -> None:
        super().__init__(bench, code, fresh_per_case)
        self._task = task
        self._all = [*task.public, *task.hidden]

    @property
    def cases(self) -> Sequence[CaseInfo]:
        """The calls."""
        public = len(self._task.public)
        found = []
        for index, case in enumerate(self._all):
            parts = [*map(shown, case.args), *(f"{key}={shown(value)}" for key, value in case.kwargs.items())]
            words = f"{self._task.entry}({', '.join(parts)})"
            found.append(
                CaseInfo(
                    hidden=index >= public,
                    weight=case.weight,
                    shown_input=words,
                    expected=shown(case.expected),
                )
            )
        return found

    async def load(self) -> Finding | None:
        """Run the submission."""
        await self._bench.fresh()
        return failure_of(await self._bench.execute(self._code))

    async def ask(self, index: int) -> Finding:
        """Call the function with one case's arguments."""
        case, entry = self._all[index], self._task.entry
        call = await self._bench.call(entry, case.args, case.kwargs)
        failure = failure_of(call.execution)
        if failure is not None:
            error = call.execution.error
            if error is not None and (error.ename, error.evalue) == (
                "NameError",
                f"name {entry!r} is not defined",
            ):
                return Finding(category="missing", message=failure.message)
            return failure
        if self._task.compare.holds(call.value, case.expected, case.args, case.kwargs):
            return PASSED
        return Finding(category="wrong_answer", got=shown(call.value))
