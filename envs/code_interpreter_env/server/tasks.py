"""Tasks, as the environment offers them: which there are, which one a reset means, and what judges submissions."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openenv_core.sandbox import Backend, Interpreter, Limits

from ..errors import InvalidResetOption
from ..grading import JsonlTasks, Task
from ..tasks import SHIPPED as SHIPPED_TASKS
from .settings import NO_TASKS, SHIPPED


def open_tasks(source: str) -> JsonlTasks | None:
    """Return the tasks that the settings name; None where there are to be none.

    Raises:
        ConfigurationError: There is no such folder or file.
    """
    if source == NO_TASKS:
        return None
    return JsonlTasks(SHIPPED_TASKS if source == SHIPPED else Path(source))


async def chosen_task(tasks: JsonlTasks | None, option: Any, seed: int | None) -> Task:
    """Return the task that a reset means.

    Args:
        tasks: All that there are; None where the server has none.
        option: An id; or a mapping with `split`, and `index` or `id`, or neither of them.
        seed: Chooses one of the split where the option does not; None chooses at random.

    Raises:
        InvalidResetOption: There is no such task.
    """
    if tasks is None:
        raise InvalidResetOption(
            "expected a server with tasks for the reset option task, got one without; set CODE_INTERPRETER_TASKS "
            "where it is started"
        )
    try:
        return await asyncio.to_thread(_find, tasks, option, seed)  # it reads files
    except (KeyError, IndexError) as error:
        raise InvalidResetOption(f"reset option task: {error.args[0]}") from None


def _find(tasks: JsonlTasks, option: Any, seed: int | None) -> Task:
    if isinstance(option, str):
        for split in tasks.splits:
            try:
                return tasks.task(split, tasks.find(split, option))
            except KeyError:
                continue
        raise KeyError(f"expected the id of a task, got {option!r:.80}")
    if (
        not isinstance(option, Mapping)
        or not set(option) <= {"split", "index", "id"}
        or "split" not in option
    ):
        raise InvalidResetOption(
            f'expected an id, or a mapping such as {{"split": "train", "index": 3}}, for the reset option task, got '
            f"{option!r:.80}"
        )
    split = option["split"]
    if "id" in option:
        return tasks.task(split, tasks.find(split, option["id"]))
    if "index" in option:
        return tasks.task(split, option["index"])
    return tasks.task(split, random.Random(seed).randrange(tasks.num_tasks(split)))


class TaskMethods:
    """The methods of `openenv_core.tasks.TaskProvider`; they show nothing that is hidden."""

    _tasks: JsonlTasks | None

    async def list_splits(self) -> Sequence[Any]:
        """Return the splits of the tasks."""
        found: Sequence[Any] = await self._about_tasks("list_splits")
        return found

    async def list_tasks(self, split: str) -> Sequence[Any]:
        """Return the tasks of a split, without what is hidden."""
        found: Sequence[Any] = await self._about_tasks("list_tasks", split)
        return found

    async def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        found: int = await self._about_tasks("num_tasks", split)
        return found

    async def get_task(self, split: str, index: int) -> Any:
        """Return one task, without what is hidden."""
        return await self._about_tasks("get_task", split, index)

    async def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> Sequence[Any]:
        """Return the tasks from `start` to before `stop`."""
        found: Sequence[Any] = await self._about_tasks("get_task_range", split, start, stop)
        return found

    async def _about_tasks(self, method: str, *args: Any) -> Any:
        if self._tasks is None:
            raise NotImplementedError  # what the task routes answer as such
        return await asyncio.to_thread(getattr(self._tasks, method), *args)  # it reads files


class Judging:
    """Opens the interpreters in which submissions are judged, apart from the session's own.

    Args:
        hold: Returns the backend, started.
        packages: What they have imported.
    """

    def __init__(self, hold: Callable[[], Awaitable[Backend]], packages: tuple[str, ...]) -> None:
        self._hold = hold
        self._packages = packages

    async def open(self, limits: Limits) -> Interpreter:
        """Start one; whoever asked for it closes it."""
        return await (await self._hold()).open(limits, packages=self._packages)
