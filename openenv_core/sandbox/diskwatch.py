"""Looks after the size of a workspace while code runs, where the file system does not."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from openenv_core.sandbox.workspace import Workspace

PERIOD_S: Final = 0.25
"""Seconds between two looks. What code can write in that time is what it can exceed its limit by."""


class DiskWatch:
    """For the time of one execution; one that is over before the first look costs next to nothing.

    Args:
        workspace: What to look at.
        exceeded: Called once, when it holds more than it may.
    """

    def __init__(self, workspace: Workspace, exceeded: Callable[[], None]) -> None:
        self._workspace = workspace
        self._exceeded = exceeded
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        if not self._workspace.bounded:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        if await asyncio.to_thread(self._workspace.exceeded):
            self._exceeded()
        else:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._start)
