"""Tasks in the background: their owner hears of their death."""

import asyncio
from collections.abc import Callable
from typing import Any


def tell_of_errors(task: "asyncio.Task[Any]", failed: Callable[[BaseException], object]) -> None:
    """Call `failed` with the error that a task ends in, if it does. One that is cancelled ends in none."""

    def ended(task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(error)

    task.add_done_callback(ended)
