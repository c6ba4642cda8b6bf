"""A task being worked on: what the environment holds between reset and the last submission."""

from .grader import Grader
from .task import Task, public_view
from .verdict import Verdict


class NoAttemptsLeft(ValueError):  # noqa: N818 - it says what happened
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
            NoAttemptsLeft: Every attempt was used, or the task is solved.
        """
        if self.done:
            raise NoAttemptsLeft(
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
