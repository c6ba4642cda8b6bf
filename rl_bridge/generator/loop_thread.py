"""An event loop on a thread of its own, for engines that live in one."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rl_bridge.errors import EngineFailedError, GeneratorError

T = TypeVar("T")

CLOSED = "the engine is closed"
GRACE_PERIOD_S = 5.0
"""What has been submitted ends by itself when the end is announced; for what does not there is a bound."""


class EngineLoopThread:
    """Runs coroutines, begun in the order in which they are submitted, from whatever thread, until it ends.

    Args:
        name: Of the thread.
        clean_up: Called in the loop at its end, when nothing else runs there any more.

    Attributes:
        ended: Done when the thread has ended: with None after `close`, otherwise with what `end` was told.
    """

    def __init__(self, name: str, clean_up: Callable[[], Awaitable[None]]) -> None:
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # or who does not wait any more would take it from the others
        self._clean_up = clean_up
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self._closed = False
        self._failure: BaseException | None = None
        self._under_way: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; before, nothing is taken."""
        with self._lock:
            self._loop = asyncio.new_event_loop()
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Have a coroutine run; cancelling the future cancels it. When the loop ends first, it fails.

        Raises:
            GeneratorError: The loop has ended, or has not begun.
        """
        with self._lock:
            if self._closed or self._loop is None:
                work.close()
                raise self._error()
            future = asyncio.run_coroutine_threadsafe(self._guarded(work), self._loop)
            self._under_way.add(future)  # before the end can be announced, which looks for it there
        future.add_done_callback(self._under_way.discard)
        return future

    def require_open(self) -> None:
        """Look whether anything can be submitted.

        Raises:
            GeneratorError: It cannot.
        """
        with self._lock:
            if self._closed:
                raise self._error()

    def end(self, failure: BaseException | None = None) -> None:
        """Take nothing more, and fail what is under way; returns at once. Only the first word counts."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._failure = True, failure
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._ending.set)

    def close(self, timeout_s: float) -> None:
        """End, and wait for the thread to."""
        self.end()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _error(self) -> GeneratorError:
        if self._failure is None:
            return GeneratorError(CLOSED)
        return EngineFailedError(f"the engine has failed: {self._failure}")

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        working, ending = asyncio.ensure_future(work), asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise self._error() from self._failure
        finally:
            ending.cancel()
            working.cancel()
            await asyncio.wait({working})
        return working.result()

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._until_ended())
        except BaseException as error:  # the thread's death must reach whoever waits
            self.end(error)
            self._failure = self._failure or error
        if self._failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(self._failure)

    async def _until_ended(self) -> None:
        await self._ending.wait()
        under_way = [asyncio.wrap_future(future) for future in list(self._under_way)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_PERIOD_S):
                await asyncio.gather(*under_way, return_exceptions=True)
        await self._clean_up()
