"""Being told to go, by SIGTERM or by a caller, before all of the work is done."""

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

INSTALL_TIMEOUT_S = 5.0


class NoMainLoopError(RuntimeError):
    """The main thread of this process runs no event loop that a signal could wake."""


async def on_termination(notify: Callable[[], None]) -> None:
    """Have SIGTERM call `notify` on the running event loop, in place of what it did.

    Signals reach the main thread alone. In a process of Monarch's that thread waits in an event loop, while actors have
    one on a thread of their own; so the handler is put on the main thread's, and hands the news on.

    Raises:
        NoMainLoopError: There is none.
    """
    here = asyncio.get_running_loop()
    installed: asyncio.Future[None] = here.create_future()

    def told() -> None:
        here.call_soon_threadsafe(notify)

    def install(loop: asyncio.AbstractEventLoop) -> None:
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGTERM, told)
            here.call_soon_threadsafe(installed.set_result, None)

    for loop in _running_loops():
        loop.call_soon_threadsafe(install, loop)
    try:
        async with asyncio.timeout(INSTALL_TIMEOUT_S):
            await installed
    except TimeoutError:
        raise NoMainLoopError(
            "expected an event loop in the main thread to take SIGTERM, found none; "
            "set rollout.checkpoint_on_preemption=false"
        ) from None


def _running_loops() -> list[asyncio.AbstractEventLoop]:
    # Loops know no list of themselves, and only the thread of one can name it. By its type: some objects of other
    # libraries do things when they are asked for their class.
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), asyncio.AbstractEventLoop) and one.is_running()
    ]


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
