"""One call of a session that several may ask: with a deadline, and without its caller where that one leaves."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from servers.execution import FATAL, Runner, end, keep
from servers.sessions.refusals import DeadlinePassed, UnknownSession
from servers.sessions.session import Session

T = TypeVar("T")


class Ender(Protocol):
    """What ends a session whose environment takes too long."""

    step_timeout_s: float | None

    def expire(self, session: Session) -> DeadlinePassed:
        """Take the session away and give its slot back, at once."""

    async def finish(self, session: Session) -> None:
        """Close its environment, after the call has ended at last."""


class Call(Generic[T]):
    """Runs in a task of its own, since neither its caller nor its deadline can be made to wait for it.

    Args:
        ender: Ends the session at the deadline.
        session: Its turn has been taken; it is given back when the call is over.
        work: What to do.

    Attributes:
        task: What is under way.
        expired: The deadline has passed. The session is over, and is closed once the task ends.
    """

    def __init__(self, ender: Ender, session: Session, work: Callable[[Runner], Awaitable[T]]) -> None:
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
                UnknownSession(session.id)
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


async def _outcome(work: Callable[[Runner], Awaitable[T]], runner: Runner) -> tuple[bool, T | BaseException]:
    try:
        return True, await work(runner)
    except FATAL as error:
        # SystemExit out of a task would end the loop.
        return False, error
