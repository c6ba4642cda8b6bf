"""A thread with an event loop, for callers that have none."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from openenv_core.errors import ClientClosed

T = TypeVar("T")

LIVENESS_S: Final = 1.0
"""How often, in seconds, a waiting caller looks whether the thread still lives."""

STOP_S: Final = 10.0
"""How long, in seconds, a stopping thread may take to cancel what still runs in it."""


class _Errand(Generic[T]):
    """A coroutine on its way to the thread, and what became of it on the way back.

    The standard library's way makes two futures and a condition for each call, which for a step over loopback
    would be a third of its cost.
    """

    __slots__ = ("_done", "_error", "_result", "_task", "_work")

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._done = threading.Lock()
        self._done.acquire()
        self._task: asyncio.Task[T] | None = None
        self._error: BaseException | None = None
        self._result: T

    def start(self) -> None:
        """Begin, in the thread."""
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._finish)

    def cancel(self) -> None:
        """Give it up, in the thread."""
        if self._task is not None:
            self._task.cancel()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it is over within the time."""
        return self._done.acquire(timeout=timeout_s)

    def outcome(self) -> T:
        """Return what the coroutine returned.

        Raises:
            ClientClosed: It was cancelled with the thread.
            BaseException: Whatever the coroutine raised.
        """
        error = self._error
        if error is None:
            return self._result
        try:
            if isinstance(error, asyncio.CancelledError):
                raise ClientClosed("expected a reply, but the client was closed meanwhile") from None
            raise error
        finally:
            self._error = error = None  # its traceback holds this frame

    def _finish(self, task: "asyncio.Task[T]") -> None:
        try:
            self._result = task.result()
        except BaseException as error:
            self._error = error
        self._task = None
        self._done.release()


class LoopThread:
    """Runs coroutines in a thread of its own until it is stopped.

    The thread is a daemon: a program that forgets to stop it can still end.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="openenv-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and wait for its outcome.

        An exception in the waiting thread, Ctrl-C for one, cancels the coroutine.

        Raises:
            ClientClosed: The thread has ended, or this process is a fork of the one that has it.
        """
        if self._loop is None:
            self._ready.wait()
        loop = self._loop
        if loop is None or not self._alive():
            work.close()
            raise ClientClosed(
                "expected a running client, got one whose background thread has ended; make a new one"
            )
        errand = _Errand(work)
        try:
            loop.call_soon_threadsafe(errand.start)
        except RuntimeError:
            work.close()
            raise ClientClosed("expected a running client, got one that was closed meanwhile") from None
        try:
            while not errand.wait(LIVENESS_S):
                if not self._alive():
                    if errand.wait(0):
                        break
                    work.close()
                    raise ClientClosed("expected a reply, but the client's background thread has ended")
        except BaseException:
            with suppress(RuntimeError):  # the loop has closed, and has cancelled what ran in it
                loop.call_soon_threadsafe(errand.cancel)
            raise
        return errand.outcome()

    def stop(self) -> None:
        """End the thread, cancelling what still runs in it. Idempotent."""
        if not self._alive():
            return
        self._ready.wait()
        loop, end = self._loop, self._end
        if loop is not None and end is not None:
            try:
                loop.call_soon_threadsafe(end.set)
            except RuntimeError:
                return  # it has closed by itself
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)

    def finish(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a last coroutine and end the thread, without waiting: a garbage collector may call this."""
        self._ready.wait()
        loop, end = self._loop, self._end
        if loop is None or end is None or not self._alive():
            work.close()
            return

        async def last() -> None:
            try:
                await work
            finally:
                end.set()

        final = last()
        try:
            asyncio.run_coroutine_threadsafe(final, loop)
        except RuntimeError:  # the loop has closed just now
            final.close()
            work.close()

    @property
    def inherited(self) -> bool:
        """Whether this process is a fork of the one that has the thread."""
        return self._pid != os.getpid()

    def _alive(self) -> bool:
        return not self.inherited and self._thread.is_alive()

    def _main(self) -> None:
        async def forever() -> None:
            self._end = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            self._ready.set()
            await self._end.wait()
            # What comes from here on would run, if at all, in a loop that is being taken down.
            self._loop = None

        try:
            asyncio.run(forever())
        finally:
            self._ready.set()
