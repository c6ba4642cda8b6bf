"""One session: an environment, whose it is, and the calls that are made of it in order."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar

from openenv_core.watchdog import Watchdog
from servers.execution import FATAL, EnvironmentRunner, end, keep
from servers.sessions.slots import DeadlineExceededError, SessionBusyError, UnknownSessionError

MAX_WAITING: Final = 32
"""Calls that may wait for one session while another is under way."""

T = TypeVar("T")
P = ParamSpec("P")


class _Table(Protocol):
    """What a session asks of the table that it is in."""

    step_timeout_s: float | None

    def expire(self, session: "EnvironmentSession") -> DeadlineExceededError:
        """Take the session away and give its slot back, at once."""

    def drop(self, session: "EnvironmentSession") -> asyncio.Task[None]:
        """End the session: close its environment, after the call has ended at last."""


class EnvironmentSession:
    """One environment under an identity of its own. It knows no socket.

    Attributes:
        runner: The environment and where it runs.
        owner: Fingerprint of the token that opened it; empty where there are no tokens.
        standing: It lives until it is closed or goes unused; otherwise as long as the block that opened it.
        id: By what it is found; empty until it has been handed out.
        attached: A socket speaks for it.
        closing: It ends when its socket leaves.
        ending: Its environment is being closed.
        shared: Others than the socket that opened it may ask it.
        over: It has ended, or is about to; nobody finds it any more.
        holds_slot: Its slot has not been given back yet.
        began: When it was opened, by the loop's clock.
        used: It has been asked for something.
        last_use: When that was, or when it was opened, by the loop's clock.
        listeners: Requests under way beside its calls, streams that stay open among them; they keep it in use.
        on_over: Called once when it has ended.
        let_go: Ends the hold of a socket that has broken, and that its client may not come back for.
        call: The call that is under way in a task of its own.
        watch: Where one caller alone asks, one thing after the other: looks at the time of its calls.
        on_expiry: Called when a call of that caller outlasts its time.
    """

    def __init__(self, table: _Table, runner: EnvironmentRunner, owner: str, session_id: str) -> None:
        self.runner = runner
        self.owner = owner
        self.id = session_id
        self.standing = self.shared = bool(session_id)
        self.attached = not session_id
        self.closing = self.ending = self.over = self.used = False
        self.holds_slot = True
        self.began = asyncio.get_running_loop().time()
        self.last_use = 0.0
        self.listeners = 0
        self.on_over: Callable[[], None] | None = None
        self.let_go: Callable[[], Awaitable[None]] | None = None
        self.call: _SessionCall[Any] | None = None
        self.watch: Watchdog | None = None
        self.on_expiry: Callable[[], None] | None = None
        self._table = table
        self._turn: asyncio.Lock | None = None
        self._waiting = 0

    @property
    def alone(self) -> bool:
        """Whether one caller alone asks, one thing after the other, so that it takes no turns."""
        return self.watch is not None and not self.shared

    @property
    def busy(self) -> bool:
        """Whether a call is under way or waits."""
        return self._turn is not None and self._turn.locked()

    async def run(
        self,
        work: Callable[Concatenate[EnvironmentRunner, P], Awaitable[T]],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Do something in the session: one call at a time, each with a deadline.

        The call of a session that stands by itself goes on when whoever asked has left.

        Raises:
            RefusalError: `SessionBusyError`, `UnknownSessionError` (it has ended), or `DeadlineExceededError`.
            Exception: Whatever the environment raised.
        """
        if self.watch is not None and not self.shared:
            if self.over:
                raise UnknownSessionError(self.id)
            if self.on_expiry is None:
                return await work(self.runner, *args, **options)
            self.watch.expect(self._table.step_timeout_s, self.on_expiry)
            try:
                return await work(self.runner, *args, **options)
            finally:
                self.watch.stop()
        return await self.run_waiting(lambda runner: work(runner, *args, **options))

    async def run_waiting(self, work: Callable[[EnvironmentRunner], Awaitable[T]]) -> T:
        """Do something in a task of its own, whoever asks; otherwise as `run`."""
        await self._take_turn()
        return await _SessionCall(self._table, self, work(self.runner)).result()

    async def _take_turn(self) -> None:
        """Wait until no other call is under way."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        if self._waiting >= MAX_WAITING:
            raise SessionBusyError(self._waiting)
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        if self.over:
            self._turn.release()
            raise UnknownSessionError(self.id)
        self.used = True

    def _turn_over(self) -> None:
        """Let the next call come."""
        assert self._turn is not None
        self._turn.release()
        self.last_use = asyncio.get_running_loop().time()


class _SessionCall(Generic[T]):
    """Runs in a task of its own, since neither its caller nor its deadline can be made to wait for it.

    Attributes:
        task: What is under way.
        expired: The deadline has passed. The session is over, and is closed once the task ends.
    """

    def __init__(self, table: _Table, session: EnvironmentSession, work: Awaitable[T]) -> None:
        loop = asyncio.get_running_loop()
        self.expired = False
        self._table = table
        self._session = session
        self._reply: asyncio.Future[T] = loop.create_future()
        limit = table.step_timeout_s
        self._timer = None if limit is None else loop.call_later(limit, self._expire)
        self.task = keep(asyncio.create_task(outcome_of_work(work)))
        self.task.add_done_callback(self._finish)
        session.call = self

    async def result(self) -> T:
        """Wait for the outcome; raise whatever the environment raised."""
        try:
            return await self._reply
        except asyncio.CancelledError:
            if not self._session.shared:
                await end(self.task)
            raise

    def _expire(self) -> None:
        if self.task.done():
            return
        self.expired = True
        refusal = self._table.expire(self._session)
        if not self._reply.done():
            self._reply.set_exception(refusal)
        self._session._turn_over()  # those who wait learn that it is over
        self.task.cancel()

    def _finish(self, task: asyncio.Task[tuple[bool, Any]]) -> None:
        session = self._session
        session.call = None
        if self._timer is not None:
            self._timer.cancel()
        if self.expired:
            self._table.drop(session)
            return
        session._turn_over()
        if self._reply.done():
            return  # whoever asked has left
        if task.cancelled():
            own = RuntimeError("the environment cancelled its own call")
            self._reply.set_exception(UnknownSessionError(session.id) if session.over else own)
            return
        succeeded, value = task.result()
        if succeeded:
            self._reply.set_result(value)
        else:
            self._reply.set_exception(value)


async def outcome_of_work(work: Awaitable[T]) -> tuple[bool, T | BaseException]:
    """Await something and return what came of it."""
    try:
        return True, await work
    except FATAL as error:
        # SystemExit out of a task would end the loop.
        return False, error
