"""A session with an MCP server that is an object of this process: FastMCP's, or the official SDK's.

What such a server needs (a client, a lifespan, an event loop that lives as long as both) is kept in a thread of its
own, so that a tool which blocks holds up no other session, and so that plain methods can call tools as well.
"""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError as CancelledFuture
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, Final, TypeVar

from openenv_core.errors import ClientClosed, ConfigurationError
from openenv_core.loop_thread import LoopThread
from openenv_core.protocol.faults import text_of
from openenv_core.tools import ToolFailed, ToolUnavailable
from openenv_core.tools.outcomes import cancellations_of_task

T = TypeVar("T")

CLOSE_S: Final = 5.0
"""How long, in seconds, a server object may take to end its session."""


def client_class(server: Any) -> Callable[[Any], Any]:
    """Return the client that the server object's own package brings; nothing is imported for it.

    Raises:
        ConfigurationError: It brings none.
    """
    for cls in type(server).__mro__:
        package = sys.modules.get(cls.__module__.partition(".")[0])
        client = getattr(package, "Client", None)
        if callable(client) and hasattr(client, "call_tool"):
            return client  # type: ignore[no-any-return]
    raise ConfigurationError(
        "expected an MCP server object whose package has a Client, FastMCP of fastmcp 2 or later or MCPServer of mcp 2 "
        f"or later, got {type(server).__module__}.{type(server).__qualname__}"
    )


def run_to_end(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function to its end, from a thread with an event loop or without."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


def in_thread(work: Callable[[], T]) -> "Future[T]":
    """Call a function in a thread that nobody waits for at the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="openenv-step", daemon=True).start()
    return future


class Link:
    """A session with a server object. It begins with the first request.

    Args:
        server: The object.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self._client = client_class(server)
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._closed = False
        self._opened: asyncio.Future[Any] | None = None
        self._holder: asyncio.Task[None] | None = None
        self._end: asyncio.Event | None = None

    def new_client(self) -> Any:
        """Return a client that is not connected."""
        return self._client(self._server)

    def submit(self, work: Callable[[Any], Awaitable[T]]) -> "Future[T]":
        """Call a function with the client, in the session's thread.

        Raises:
            ClientClosed: The session has ended.
        """
        with self._lock:
            if self._closed:
                raise ClientClosed("expected an open environment, got a tool call after close()")
            if self._thread is None:
                self._thread = LoopThread()
        return self._thread.submit(self._do, work)

    def run(self, work: Callable[[Any], Awaitable[T]], timeout_s: float | None = None) -> T:
        """Do the same and wait for it.

        Raises:
            TimeoutError: It took longer; it is cancelled.
            ToolFailed: It cancelled itself, or would have ended the process.
        """
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            future.cancel()
            raise
        except CancelledFuture:
            raise self._cancelled() from None
        except (SystemExit, KeyboardInterrupt) as error:
            if not future.done():  # the keys were pressed here
                future.cancel()
                raise
            raise self._left(error) from error

    async def arun(self, work: Callable[[Any], Awaitable[T]], timeout_s: float | None = None) -> T:
        """Do the same and await it."""
        async with asyncio.timeout(timeout_s):
            before = cancellations_of_task()
            try:
                return await asyncio.wrap_future(self.submit(work))
            except asyncio.CancelledError:
                if cancellations_of_task() > before:
                    raise
                raise self._cancelled() from None
            except (SystemExit, KeyboardInterrupt) as error:
                raise await asyncio.to_thread(self._left, error) from error

    def close(self) -> None:
        """End the session and its thread. Idempotent."""
        with self._lock:
            thread, self._thread, self._closed = self._thread, None, True
        if thread is None or thread.inherited:
            return
        with suppress(
            Exception
        ):  # the server object's own end may fail, or never come; the thread's does not wait
            thread.submit(self._finish).result(CLOSE_S)
        thread.stop()

    def _cancelled(self) -> Exception:
        if self._closed:
            return ClientClosed("expected an open environment, got its close() during a tool call")
        return ToolFailed(
            "expected a result, got a cancellation; the tool cancelled itself, or awaited what was cancelled"
        )

    def _left(self, error: BaseException) -> ToolFailed:
        """Begin anew with the next request: an exit ends the event loop that it comes to."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._opened = self._holder = self._end = None
        if thread is not None:
            thread.stop()
        return ToolFailed(f"{type(error).__name__}: {text_of(error)}")

    async def _do(self, work: Callable[[Any], Awaitable[T]]) -> T:
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            # Clients have to be left by the task that has entered them.
            self._holder = asyncio.create_task(self._hold(self._opened))
        try:
            client = await asyncio.shield(self._opened)
        except Exception as error:
            raise ToolUnavailable(f"expected the environment's MCP server to start, got: {error}") from error
        return await work(client)

    async def _hold(self, opened: "asyncio.Future[Any]") -> None:
        self._end = asyncio.Event()
        try:
            async with self._client(self._server) as client:
                opened.set_result(client)
                await self._end.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)

    async def _finish(self) -> None:
        if self._end is not None:
            self._end.set()
        if self._holder is not None:
            await self._holder
