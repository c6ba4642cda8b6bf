"""Work that somebody may stop before all of it is done."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def until_stopped(works: Sequence[Coroutine[Any, Any, T]], stop: asyncio.Event) -> list[T | None]:
    """Run coroutines at once until all are done or it is time to stop.

    Args:
        works: What is to be done.
        stop: Set, by whoever does not want to wait any longer.

    Returns:
        What each has returned, in order; None for those that were stopped.

    Raises:
        Exception: The first that one of them raised; the others are stopped.
    """
    stopping = asyncio.ensure_future(stop.wait())
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        left: set[asyncio.Future[Any]] = set(tasks)
        while left and not stopping.done():
            done, left = await asyncio.wait({*left, stopping}, return_when=asyncio.FIRST_COMPLETED)
            left.discard(stopping)
            for one in done:
                one.result()
    finally:
        for task in (stopping, *tasks):
            task.cancel()
        await asyncio.gather(stopping, *tasks, return_exceptions=True)
    return [None if task.cancelled() or task.exception() is not None else task.result() for task in tasks]
