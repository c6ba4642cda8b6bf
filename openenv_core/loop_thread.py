"""A thread with an event loop, for synchronous callers."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Final, Generic, ParamSpec, TypeVar

from openenv_core.errors import ClientClosedError, ClientError, ConfigurationError, ProviderError

T = TypeVar("T")
P = ParamSpec("P")

LIVENESS_CHECK_INTERVAL_S: Final = 1.0
"""How often, in seconds, a waiting caller checks that the thread is alive."""

STOP_TIMEOUT_S: Final = 10.0
"""How long, in seconds, a stopping thread may take to cancel its tasks."""

MAX_HELPERS: Final = 64
"""Maximum threads of the loop's executor, which looks up addresses and stops servers. Created on demand."""

MAX_STARTS: Final = 64
"""Maximum number of servers that are started at once."""


class _ThreadCall(Generic[T]):
    """A call of a coroutine function in the thread, and its outcome.

    `asyncio.run_coroutine_threadsafe` creates two futures and a condition for each call, and a callback that costs
    another iteration of the loop: a third of the cost of a step over loopback.
    """

    __slots__ = ("_args", "_done", "_error", "_options", "_result", "_work", "task")

    def __init__(
        self, work: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **options: P.kwargs
    ) -> None:
        self._work = work
        self._args = args
        self._options = options
        self._done = threading.Lock()
        self._done.acquire()
        self.task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._result: T

    def refuse(self) -> None:
        """Cancel the call before it starts."""
        self._error = asyncio.CancelledError()
        self._done.release()

    def cancel(self) -> None:
        """Cancel the running call. Called in the thread."""
        if self.task is not None:
            self.task.cancel()

    def wait(self, timeout_s: float) -> bool:
        return self._done.acquire(timeout=timeout_s)

    def outcome(self) -> T:
        """Return the coroutine's result.

        Raises:
            ClientClosedError: It was cancelled when the thread stopped.
            BaseException: The coroutine's own exception.
        """
        error = self._error
        if error is None:
            return self._result
        try:
            if isinstance(error, asyncio.CancelledError):
                raise ClientClosedError("the client was closed before the reply came; make another") from None
            if isinstance(error, ClientError | ProviderError):
                _drop_frames(error)
            raise error
        finally:
            self._error = error = None  # its traceback holds this frame

    async def run(self) -> None:
        try:
            self._result = await self._work(*self._args, **self._options)
        except asyncio.CancelledError as error:
            self._error = error
            raise  # the task must end as cancelled too
        except BaseException as error:
            self._error = error  # SystemExit too: it belongs to the caller, not to the shared thread
        finally:
            self.task = None
            self._done.release()


def _drop_frames(error: BaseException) -> None:
    """Remove the frames of an error and its causes: the message says what failed, and they would bury the caller's."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


class LoopThread:
    """Runs coroutines in a background thread until it is stopped.

    The thread is a daemon, so that a program that does not stop it can still exit.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="openenv-client", daemon=True)
        self._thread.start()

    def run(self, work: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **options: P.kwargs) -> T:
        """Call a coroutine function in the thread and wait for its result.

        An exception in the waiting thread, such as Ctrl-C, cancels the coroutine.

        Raises:
            ClientClosedError: The thread has ended, or belongs to the process that this one was forked from.
            ConfigurationError: Called in the thread itself, which would wait for itself.
        """
        if self._loop is None:
            self._ready.wait()
        loop = self._loop
        if loop is None or not self._alive():
            raise ClientClosedError(
                "the client's background thread has ended, or is that of the process that this one was forked from; "
                "make a new client"
            )
        if threading.get_ident() == self._thread.ident:
            raise ConfigurationError(
                "a method that waits was called inside of the event loop that it waits for; await the method of the "
                "async client or environment there"
            )
        call = _ThreadCall(work, *args, **options)
        try:
            loop.call_soon_threadsafe(self._start_call, call)
            while not call.wait(LIVENESS_CHECK_INTERVAL_S):
                if not self._alive() and not call.wait(0):
                    # The loop was closed before it ran the call.
                    raise ClientClosedError("the client's background thread has ended before the reply came")
        except RuntimeError:  # the loop has closed just now
            raise ClientClosedError("the client was closed before the reply came; make a new one") from None
        except BaseException:
            with suppress(RuntimeError):  # the loop has closed and cancelled its tasks
                loop.call_soon_threadsafe(call.cancel)
            raise
        return call.outcome()

    def submit(
        self, work: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **options: P.kwargs
    ) -> "Future[T]":
        """Call a coroutine function in the thread without waiting for it.

        Returns:
            A future of its result; cancelling it cancels the coroutine.

        Raises:
            ClientClosedError: The thread has ended, or belongs to the process that this one was forked from.
        """
        self._ready.wait()
        loop = self._loop
        if loop is None or not self._alive():
            raise ClientClosedError("the thread has ended; make a new one")
        coroutine = work(*args, **options)
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:  # the loop has closed just now
            coroutine.close()
            raise ClientClosedError("the thread has ended meanwhile") from None

    def stop(self) -> None:
        """Stop the thread and cancel its tasks. Idempotent."""
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
            self._thread.join(STOP_TIMEOUT_S)

    def call_detached(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Start a coroutine function and discard its result. Safe to call during garbage collection."""
        self._ready.wait()
        loop = self._loop
        if loop is None or not self._alive():
            return
        with suppress(RuntimeError):  # the loop has closed just now
            loop.call_soon_threadsafe(self._start_call, _ThreadCall(work))

    @property
    def is_stopped(self) -> bool:
        """Whether the thread accepts no more calls: it is stopping, has ended, or belongs to another process."""
        return not self._alive() or (self._ready.is_set() and self._loop is None)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that the thread runs in."""
        return self._pid != os.getpid()

    def _start_call(self, call: _ThreadCall[Any]) -> None:
        # A call that arrives after `stop` would run, if at all, in a loop that is shutting down.
        loop = self._loop
        if loop is None:
            call.refuse()
        else:
            call.task = loop.create_task(call.run())

    def _alive(self) -> bool:
        return not self.is_forked and self._thread.is_alive()

    def _main(self) -> None:
        async def forever() -> None:
            self._end = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            self._loop.set_default_executor(ThreadPoolExecutor(MAX_HELPERS, "openenv-client-helper"))
            self._ready.set()
            await self._end.wait()
            self._loop = None

        try:
            # Not uvloop, which saves a quarter of a step's CPU time: a program that forks crashes at the child's exit.
            asyncio.run(forever())
        except RuntimeError:
            # Since Python 3.12 no thread can start at interpreter exit, not even the one that shuts down the loop's
            # executor. Everything else is done by then.
            if self._end is None or self._loop is not None:
                raise
        finally:
            self._ready.set()


_lock = threading.Lock()
_shared: LoopThread | None = None


def shared_loop() -> LoopThread:
    """Return the thread that all sync clients of this process share. It runs until the process exits."""
    global _shared
    with _lock:
        if _shared is None or _shared.is_stopped:
            _shared = LoopThread()
        return _shared


_starts = ThreadPoolExecutor(MAX_STARTS, "openenv-start")


def start_in_thread(start: Callable[[], T]) -> asyncio.Future[T]:
    """Call a function that starts a server in a thread, on no loop's executor: a start may take minutes.

    Address lookups would wait for the loop's, and so would the stop that ends the start.
    """
    return asyncio.get_running_loop().run_in_executor(_starts, copy_context().run, start)


def _renew_after_fork() -> None:
    global _lock, _starts
    _lock = threading.Lock()
    _starts = ThreadPoolExecutor(MAX_STARTS, "openenv-start")


os.register_at_fork(after_in_child=_renew_after_fork)


def run_async_safely(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion, from a thread with or without a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coro)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coro).result()
