"""Where a submission runs while it is graded: one interpreter, the task's files, and the time that is left."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from openenv_core.errors import OpenEnvError
from openenv_core.sandbox import Call, Execution, Interpreter, Limits

from .calls import call_function
from .task import BaseTask
from .verdict import Scope


class Opens(Protocol):
    """What interpreters come from: a `Sandbox`, or a backend of the environment."""

    async def open(self, limits: Limits) -> Interpreter:
        """Start an interpreter."""


class Unavailable(Exception):  # noqa: N818 - it says what the sandbox is
    """The infrastructure failed; the submission is not to blame."""


class OutOfTime(Exception):  # noqa: N818 - it says what happened
    """The time for the whole grading is used up."""


class Bench:
    """Runs what a kind of task asks for. Every failure of the infrastructure leaves as `Unavailable`.

    Args:
        source: where the interpreter comes from.
        task: whose limits and files hold.
        limits: those that the task says nothing about.
    """

    def __init__(self, source: Opens, task: BaseTask, limits: Limits) -> None:
        self._source = source
        self._task = task
        self._limits = task.limits.applied_to(limits)
        self._interpreter: Interpreter | None = None
        self._deadline = time.monotonic() + task.limits.total_s
        self._asked = self._limits.timeout_s
        self.lost = True
        """Whether the interpreter ended, so that the submission has to be run anew."""
        self.isolation = ""

    @property
    def scope(self) -> Scope:
        """What a time-out of the last execution means: its case took too long, or there was no more time."""
        return "case" if self._asked >= self._limits.timeout_s else "total"

    async def fresh(self, more_files: Mapping[str, str] | None = None) -> None:
        """Begin with a fresh interpreter and the task's files.

        Args:
            more_files: further files of the workspace.
        """
        self._time_left()
        try:
            if self._interpreter is None:
                self._interpreter = await self._source.open(self._limits)
                self.isolation = self._interpreter.isolation
            else:
                await self._interpreter.restart()
            for path, content in {**self._task.files, **(more_files or {})}.items():
                await self._interpreter.put_file(path, content.encode())
        except (OpenEnvError, OSError) as error:
            raise Unavailable(str(error)) from error
        self.lost = False

    async def execute(self, code: str, stdin: str | None = None) -> Execution:
        """Run code, within the time of a case and of the whole."""
        return self._checked(
            await self._guarded(self._running().execute(code, timeout_s=self._time_left(), stdin=stdin))
        )

    async def call(
        self, function: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Call:
        """Call a function that the code defined."""
        call: Call = await self._guarded(
            call_function(self._running(), function, args, kwargs or {}, timeout_s=self._time_left())
        )
        self._checked(call.execution)
        return call

    async def close(self) -> None:
        """End the interpreter."""
        if self._interpreter is not None:
            interpreter, self._interpreter = self._interpreter, None
            try:
                await interpreter.close()
            except (OpenEnvError, OSError):
                return  # the verdict is known, and its source cleans up after what it opened

    def _running(self) -> Interpreter:
        if self._interpreter is None:
            raise RuntimeError("expected fresh() before anything runs")
        return self._interpreter

    async def _guarded(self, work: Any) -> Any:
        try:
            return await work
        except (OpenEnvError, OSError) as error:
            raise Unavailable(str(error)) from error

    def _time_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
        self._asked = min(left, self._limits.timeout_s)
        return self._asked

    def _checked(self, execution: Execution) -> Execution:
        if execution.status == "sandbox_error":
            raise Unavailable(execution.reason or "the sandbox failed")
        self.lost = self.lost or execution.state_lost
        return execution
