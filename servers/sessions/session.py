"""One session: an environment, its owner, and the calls made on it, one at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar

from openenv_core.watchdog import Watchdog
from servers.execution import FATAL, EnvironmentRunner, cancel_task, keep
from servers.sessions.slots import DeadlineExceededError, SessionBusyError, UnknownSessionError

MAX_WAITING: Final = 32
"""Calls that may wait for one session while another runs."""

T = TypeVar("T")
P = ParamSpec("P")


class _Table(Protocol):
    """The part of `SessionTable` that a session uses."""

    step_timeout_s: float | None

    def expire(self, session: "EnvironmentSession") -> DeadlineExceededError:
        """Remove the session from the table and free its slot immediately."""

    def drop(self, session: "EnvironmentSession") -> asyncio.Task[None]:
        """End the session and close its environment."""


class EnvironmentSession:
    """One environment with an id and an owner, independent of the connection that it is used over.

    Attributes:
        runner: The environment and where it runs.
        owner: Fingerprint of the token that opened it; empty if the server has no tokens.
        standing: Whether it lives until it is closed or idle for too long, rather than until the `with` block that
            opened it ends.
        id: Its id in the table; if it was opened without one, empty until `SessionTable.assign_id`.
        attached: Whether a WebSocket is attached to it; always true if it was opened without an id.
        closing: Whether it ends when its WebSocket disconnects.
        ending: Whether its environment is being closed.
        shared: Whether clients other than the WebSocket that opened it may call it.
        ended: Whether it has ended or is about to; the table no longer finds it.
        holds_slot: Whether its slot is still taken.
        opened_at: When it was opened, by the event loop's clock.
        was_used: Whether it has been called under its lock, or a WebSocket has been attached.
        last_used_at: When such a call or attachment last ended, or else it was opened, by the event loop's clock.
        listeners: Open requests beside its calls, such as streams; they keep it in use.
        on_end: Called once when it has ended.
        detach: Releases it from a broken WebSocket whose client may not reconnect.
        call: The call that runs in its own task, if any.
        watchdog: Enforces the deadline of calls if a single caller makes them one after the other.
        on_expiry: Called when a call of that caller exceeds its deadline.
    """

    def __init__(self, table: _Table, runner: EnvironmentRunner, owner: str, session_id: str) -> None:
        self.runner = runner
        self.owner = owner
        self.id = session_id
        self.standing = self.shared = bool(session_id)
        self.attached = not session_id
        self.closing = self.ending = self.ended = self.was_used = False
        self.holds_slot = True
        self.opened_at = asyncio.get_running_loop().time()
        self.last_used_at = 0.0
        self.listeners = 0
        self.on_end: Callable[[], None] | None = None
        self.detach: Callable[[], Awaitable[None]] | None = None
        self.call: _SessionCall[Any] | None = None
        self.watchdog: Watchdog | None = None
        self.on_expiry: Callable[[], None] | None = None
        self._table = table
        self._lock: asyncio.Lock | None = None
        self._waiting_calls = 0

    @property
    def exclusive(self) -> bool:
        """Whether a single caller makes its calls one after the other, so that it needs no lock."""
        return self.watchdog is not None and not self.shared

    @property
    def busy(self) -> bool:
        """Whether a call is running or waiting."""
        return self._lock is not None and self._lock.locked()

    async def run(
        self,
        work: Callable[Concatenate[EnvironmentRunner, P], Awaitable[T]],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Run `work(runner, ...)` on the session: one call at a time, each with a deadline.

        On a shared session, the call continues after its caller has disconnected.

        Raises:
            RefusalError: `SessionBusyError`, `UnknownSessionError` (the session has ended), or
                `DeadlineExceededError`.
            Exception: Whatever the environment raised.
        """
        if self.watchdog is not None and not self.shared:
            if self.ended:
                raise UnknownSessionError(self.id)
            if self.on_expiry is None:
                return await work(self.runner, *args, **options)
            self.watchdog.expect(self._table.step_timeout_s, self.on_expiry)
            try:
                return await work(self.runner, *args, **options)
            finally:
                self.watchdog.stop()
        return await self.run_waiting(lambda runner: work(runner, *args, **options))

    async def run_waiting(self, work: Callable[[EnvironmentRunner], Awaitable[T]]) -> T:
        """Run a coroutine as `run` does, but always in its own task."""
        await self._acquire()
        return await _SessionCall(self._table, self, work(self.runner)).result()

    async def _acquire(self) -> None:
        """Wait until no other call is running."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        if self._waiting_calls >= MAX_WAITING:
            raise SessionBusyError(self._waiting_calls)
        self._waiting_calls += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting_calls -= 1
        if self.ended:
            self._lock.release()
            raise UnknownSessionError(self.id)
        self.was_used = True

    def _release_lock(self) -> None:
        """Let the next call start."""
        assert self._lock is not None
        self._lock.release()
        self.last_used_at = asyncio.get_running_loop().time()


class _SessionCall(Generic[T]):
    """A call that runs in its own task, so that its caller and its deadline need not wait for it to end.

    Attributes:
        task: Runs the call.
        expired: Whether the deadline has passed. The session is then over, and closed once the task ends.
    """

    def __init__(self, table: _Table, session: EnvironmentSession, work: Awaitable[T]) -> None:
        loop = asyncio.get_running_loop()
        self.expired = False
        self._table = table
        self._session = session
        self._reply: asyncio.Future[T] = loop.create_future()
        limit_s = table.step_timeout_s
        self._timer = None if limit_s is None else loop.call_later(limit_s, self._expire)
        self.task = keep(asyncio.create_task(outcome_of_work(work)))
        self.task.add_done_callback(self._finish)
        session.call = self

    async def result(self) -> T:
        """Return the call's result, or raise whatever the environment raised."""
        try:
            return await self._reply
        except asyncio.CancelledError:
            if not self._session.shared:
                await cancel_task(self.task)
            raise

    def _expire(self) -> None:
        if self.task.done():
            return
        self.expired = True
        refusal = self._table.expire(self._session)
        if not self._reply.done():
            self._reply.set_exception(refusal)
        self._session._release_lock()  # waiting calls learn that the session is over
        self.task.cancel()

    def _finish(self, task: asyncio.Task[tuple[bool, Any]]) -> None:
        session = self._session
        session.call = None
        if self._timer is not None:
            self._timer.cancel()
        if self.expired:
            self._table.drop(session)
            return
        session._release_lock()
        if self._reply.done():
            return  # the caller has gone
        if task.cancelled():
            error = RuntimeError("the environment cancelled its own call")
            self._reply.set_exception(UnknownSessionError(session.id) if session.ended else error)
            return
        succeeded, value = task.result()
        if succeeded:
            self._reply.set_result(value)
        else:
            self._reply.set_exception(value)


async def outcome_of_work(work: Awaitable[T]) -> tuple[bool, T | BaseException]:
    """Await `work` and return whether it succeeded, with its result or its exception."""
    try:
        return True, await work
    except FATAL as error:
        # A SystemExit raised in a task would stop the event loop.
        return False, error
