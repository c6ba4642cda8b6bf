"""Being told to go: SIGTERM, which a process that Monarch started would otherwise die of at once."""

import asyncio
import gc
import signal
import threading
from collections.abc import Callable

INSTALL_TIMEOUT_S = 5.0


class NoMainLoop(RuntimeError):  # noqa: N818 - it says what is missing
    """The main thread of this process runs no event loop that a signal could wake."""


async def on_termination(notify: Callable[[], None]) -> None:
    """Have SIGTERM call `notify` on the running event loop, in place of what it did.

    Signals reach the main thread alone. In a process of Monarch's that thread waits in an event loop, while actors have
    one on a thread of their own; so the handler is put on the main thread's, and hands the news on.

    Raises:
        NoMainLoop: There is none.
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
        raise NoMainLoop(
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
