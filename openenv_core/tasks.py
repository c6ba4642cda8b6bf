"""The optional methods of an environment whose episodes come from a data set."""

from collections.abc import Sequence
from typing import Any, Protocol


class TaskProvider(Protocol):
    """What an environment may offer beside `reset` and `step`, so that callers can look for tasks.

    Nothing is inherited: an environment that has these methods, `def` or `async def`, answers the task routes of
    its server; a route whose method is missing answers 501. They are called on an instance that was not reset and
    is closed afterwards, so they must not depend on an episode. The chosen task goes to `reset` as options:
    `reset(split="train", index=12)`.
    """

    def list_splits(self) -> Sequence[Any]:
        """Return the splits: names, or mappings or models with `name` and `type` (train, validation or test)."""

    def list_tasks(self, split: str) -> Sequence[Any]:
        """Return the tasks of a split, or the first of them where there are very many."""

    def num_tasks(self, split: str) -> int:
        """Return how many tasks the split has."""

    def get_task(self, split: str, index: int) -> Any:
        """Return one task.

        Raises:
            IndexError: The split has no such index.
        """

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> Sequence[Any]:
        """Return the tasks from `start` to before `stop`, with the meaning that a slice gives them."""
