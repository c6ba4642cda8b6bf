"""One session: an environment, whose it is, and the calls that are made of it in order."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from servers.execution import FATAL, EnvironmentRunner, end, keep
from servers.sessions.slots import DeadlineExceededError, SessionBusyError, UnknownSessionError

MAX_WAITING = 32
"""Calls that may wait for one session while another is under way."""


class PendingCall(Protocol):
    """A call that is under way.

    Attributes:
        task: It runs in this.
        expired: Its deadline has passed; it closes the session's environment when it ends at last.
    """

    task: asyncio.Task[Any]
    expired: bool


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
        used: It has been asked for something.
        last_use: When that was, or when it was opened, by the loop's clock.
        listeners: Requests under way beside its calls, streams that stay open among them; they keep it in use.
        on_over: Called once when it has ended.
        call: The call that is under way, in a task of its own.
    """

    __slots__ = (
        "_turn",
        "_waiting",
        "attached",
        "call",
        "closing",
        "ending",
        "holds_slot",
        "id",
        "last_use",
        "listeners",
        "on_over",
        "over",
        "owner",
        "runner",
        "shared",
        "standing",
        "used",
    )

    def __init__(
        self, runner: EnvironmentRunner, owner: str = "", session_id: str = "", standing: bool = False
    ) -> None:
        self.runner = runner
        self.owner = owner
        self.id = session_id
        self.standing = standing
        self.shared = standing or bool(session_id)
        self.attached = not standing
        self.closing = self.ending = self.over = self.used = False
        self.holds_slot = True
        self.last_use = 0.0
        self.listeners = 0
        self.on_over: Callable[[], None] | None = None
        self.call: PendingCall | None = None
        self._turn: asyncio.Lock | None = None
        self._waiting = 0

    @property
    def busy(self) -> bool:
        """Whether a call is under way or waits."""
        return self._turn is not None and self._turn.locked()

    async def take_turn(self) -> None:
        """Wait until no other call is under way.

        Raises:
            RefusalError: `SessionBusyError`; too many wait.
        """
        if self._turn is None:
            self._turn = asyncio.Lock()
        if self._waiting >= MAX_WAITING:
            raise SessionBusyError(self._waiting)
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1

    def give_turn(self) -> None:
        """Let the next call come."""
        assert self._turn is not None
        self._turn.release()


T = TypeVar("T")


class Ender(Protocol):
    """What ends a session whose environment takes too long."""

    step_timeout_s: float | None

    def expire(self, session: EnvironmentSession) -> DeadlineExceededError:
        """Take the session away and give its slot back, at once."""

    async def finish(self, session: EnvironmentSession) -> None:
        """Close its environment, after the call has ended at last."""


class SessionCall(Generic[T]):
    """Runs in a task of its own, since neither its caller nor its deadline can be made to wait for it.

    Args:
        ender: Ends the session at the deadline.
        session: Its turn has been taken; it is given back when the call is over.
        work: What to do.

    Attributes:
        task: What is under way.
        expired: The deadline has passed. The session is over, and is closed once the task ends.
    """

    def __init__(
        self, ender: Ender, session: EnvironmentSession, work: Callable[[EnvironmentRunner], Awaitable[T]]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.expired = False
        self._ender = ender
        self._session = session
        self._reply: asyncio.Future[T] = loop.create_future()
        limit = ender.step_timeout_s
        self._timer = None if limit is None else loop.call_later(limit, self._expire)
        self.task = keep(asyncio.create_task(_outcome(work, session.runner)))
        self.task.add_done_callback(self._finish)
        session.call = self

    async def result(self) -> T:
        """Wait for the outcome.

        Raises:
            Exception: Whatever the environment raised.
        """
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
        refusal = self._ender.expire(self._session)
        if not self._reply.done():
            self._reply.set_exception(refusal)
        self._session.give_turn()  # those who wait learn that it is over
        self.task.cancel()

    def _finish(self, task: asyncio.Task[tuple[bool, T | BaseException]]) -> None:
        session = self._session
        session.call = None
        session.last_use = asyncio.get_running_loop().time()
        if self._timer is not None:
            self._timer.cancel()
        if self.expired:
            keep(asyncio.create_task(self._ender.finish(session)))
            return
        session.give_turn()
        if self._reply.done():
            return  # whoever asked has left
        if task.cancelled():
            error = (
                UnknownSessionError(session.id)
                if session.over
                else RuntimeError("the environment cancelled its own call")
            )
            self._reply.set_exception(error)
            return
        succeeded, value = task.result()
        if succeeded:
            self._reply.set_result(value)  # type: ignore[arg-type]
        else:
            self._reply.set_exception(value)  # type: ignore[arg-type]


async def _outcome(
    work: Callable[[EnvironmentRunner], Awaitable[T]], runner: EnvironmentRunner
) -> tuple[bool, T | BaseException]:
    try:
        return True, await work(runner)
    except FATAL as error:
        # SystemExit out of a task would end the loop.
        return False, error
