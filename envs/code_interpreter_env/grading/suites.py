"""Tasks whose tests import the submission: test code and submission share a process, so the guarantee is weaker.

What is done all the same: each test has an interpreter of its own. The submission is imported before any test code or
secret is in the process, and what it changed of builtins and of the modules that tests use is put back. The test's
answer must carry a token that is drawn for it, so that ending the process, with whatever status, passes nothing.

What cannot be prevented: code that looks through the process while a test calls it can find the test, its values and
its token. Tests that compare answers should wrap them in `plain(...)`, which refuses objects whose `==` lies; it is
there in every test module.
"""

import ast
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .bench import Bench
from .task import SuiteTask, tests_in
from .trial import PASSED, CaseInfo, Finding, LoadedTrial, failure_of

_HARNESS: Final = Path(__file__).with_name("suite_harness.py")
_RUN: Final = "_run_one_test"

_LOAD: Final = """
exec(compile({harness!r}, "<tests>", "exec"), globals())
_import_submission({module!r}, {needed!r})
"""


class SuiteTrial(LoadedTrial):
    """Imports the submission and calls one test, in a fresh interpreter for each."""

    guarantee = "shared"

    def __init__(self, bench: Bench, code: str, fresh_per_case: bool, task: SuiteTask) -> None:
        # Always: what a submission does to the process while one test runs is gone before the next.
        super().__init__(bench, code, fresh_per_case=True)
        self._task = task
        self._all = [
            *((task.public, name) for name in tests_in(task.public)),
            *((task.hidden, name) for name in tests_in(task.hidden)),
        ]
        self._loaded: str | None = None

    @property
    def cases(self) -> Sequence[CaseInfo]:
        """The tests."""
        public = len(tests_in(self._task.public))
        return [
            CaseInfo(hidden=index >= public, shown_input=name, expected="no exception")
            for index, (_, name) in enumerate(self._all)
        ]

    async def load(self) -> Finding | None:
        """Import the submission while nothing but the harness is in the process."""
        self._loaded = None
        await self._bench.fresh({f"{self._task.module}.py": self._code})
        harness = _HARNESS.read_text(encoding="utf-8")
        needed = sorted(imported_by(self._task.public, self._task.hidden) - {self._task.module})
        code = _LOAD.format(harness=harness, module=self._task.module, needed=needed)
        failure = failure_of(await self._bench.execute(code))
        # Once more, because the submission may have rewritten what was there when it was imported.
        return failure or failure_of(await self._bench.execute(harness))

    async def ask(self, index: int) -> Finding:
        """Call one test."""
        source, name = self._all[index]
        token = secrets.token_hex(16)
        call = await self._bench.call(_RUN, [source, name, token])
        failure = failure_of(call.execution)
        if failure is None:
            if type(call.value) is str and call.value == token[::-1]:
                return PASSED
            return Finding(category="error", message="the test did not come to its end")
        error = call.execution.error
        if failure.category == "error" and error is not None and error.ename == "AssertionError":
            return Finding(category="wrong_answer", message=failure.message)
        return failure


def imported_by(*sources: str) -> set[str]:
    """Return the top-level names of what test code imports."""
    names: set[str] = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names
