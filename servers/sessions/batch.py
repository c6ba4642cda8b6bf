"""Many sessions of one caller, asked together: each keeps its turn, its deadline and its slot, and fails by itself."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from openenv_core.watchdog import Watchdog
from servers.execution import EnvironmentRunner, keep
from servers.sessions.session import EnvironmentSession
from servers.sessions.slots import SessionBusyError, UnknownSessionError
from servers.sessions.table import SessionTable

_SPELL: Final = 64
"""Members that are stepped on the loop before others have their turn."""


class Member:
    """One session of a batch.

    Attributes:
        session: The session.
        ended: Its episode is over, and no other has begun.
        busy: A call is under way.
    """

    __slots__ = ("busy", "ended", "here", "number", "session")

    def __init__(self, number: int, session: EnvironmentSession) -> None:
        self.number = number
        self.session = session
        self.ended = self.busy = False
        self.here: EnvironmentRunner | None = None


class MemberCall:
    """What one member is asked, and what came of it.

    Attributes:
        member: Whom.
        outcome: What it returned, and the last observation of the episode before it if that ended here; or what was
            raised.
    """

    __slots__ = ("_action", "_autoreset", "_options", "member", "outcome", "thread")

    def __init__(
        self,
        member: Member,
        *,
        options: Mapping[str, Any] | None = None,
        action: Any = None,
        autoreset: str | None = None,
    ) -> None:
        self.member = member
        self.outcome: tuple[Any, Any] | BaseException | None = None
        self.thread: Any = None
        self._options = options
        self._action = action
        self._autoreset = autoreset

    @property
    def reads(self) -> bool:
        """Whether it reads the state."""
        return self._options is None and self._action is None

    @property
    def resets(self) -> bool:
        """Whether a step is to be a reset, because the episode before it is over."""
        return self._autoreset is not None and self.member.ended

    async def play(self, runner: EnvironmentRunner) -> tuple[Any, Any]:
        """Ask an environment: read its state, reset it, or step it and do what the autoreset says."""
        if self.reads:
            return await runner.state(), None
        if self._options is not None:
            return await self._reset(runner, self._options), None
        if self.resets:
            return await self._reset(runner, {}), None
        seen = await runner.step(self._action)
        self.member.ended = bool(getattr(seen, "done", False))
        if self._autoreset == "same_step" and self.member.ended:
            return await self._reset(runner, {}), seen
        return seen, None

    async def _reset(self, runner: EnvironmentRunner, options: Mapping[str, Any]) -> Any:
        seen = await runner.reset(options)
        self.member.ended = bool(getattr(seen, "done", False))
        return seen

    def play_here(self) -> tuple[Any, Any]:
        """Do the same in the thread that calls."""
        member = self.member
        if member.here is None:
            member.here = member.session.runner.inline()
        playing = self.play(member.here)
        try:
            playing.send(None)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        playing.close()
        raise TypeError(
            "expected a plain method to return an observation, got something to await; make the method `async`"
        )


class SessionBatch:
    """The sessions of one connection.

    Args:
        table: Where they come from.
        owner: Whose they are.
        watch: Of the connection; sessions whose methods never wait are asked under it.
    """

    def __init__(self, table: SessionTable, owner: str, watch: Watchdog) -> None:
        self._table = table
        self._owner = owner
        self._watch = watch
        self.members: list[Member] = []

    async def open(self, count: int) -> list[Member]:
        """Open sessions, all or none.

        Raises:
            RefusalError: CAPACITY_REACHED, FACTORY_ERROR, or `DeadlineExceededError`.
        """
        sessions = await self._table.admit(self._owner, count)
        begun = len(self.members)
        self.members += [Member(begun + number, session) for number, session in enumerate(sessions)]
        for session in sessions:
            if session.runner.plan.inline:
                session.watch = self._watch
        return self.members[begun:]

    async def close(self) -> None:
        """End them all. Whoever waits may be cancelled: it goes on."""
        await self._table.release([member.session for member in self.members])


class BatchRound:
    """Calls of many members, under way at once.

    Args:
        table: Of their sessions.
        calls: One a member.
    """

    def __init__(self, table: SessionTable, calls: Sequence[MemberCall]) -> None:
        self._table = table
        self._calls = calls
        self._finished: list[MemberCall] = []
        self._left = len(calls)
        self._wanted = 0
        self._waiter: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Begin; calls that never wait are over when it returns."""
        loop = asyncio.get_running_loop()
        begun: list[MemberCall] = []
        spell = 0
        for call in self._calls:
            member = call.member
            if call.outcome is None and member.busy:
                call.outcome = SessionBusyError(1)
            elif call.outcome is None and member.session.over:
                call.outcome = UnknownSessionError(f"member {member.number}, which has ended")
            if call.outcome is not None:
                self._finished.append(call)
                continue
            member.busy = True
            begun.append(call)
            session = member.session
            if session.runner.plan.inline:
                await self._run(call)
                spell += 1
                if spell % _SPELL == 0:
                    await asyncio.sleep(0)
            elif session.runner.in_thread:
                call.thread = session.runner.submit(call.play_here)
                call.thread.waiter.add_done_callback(partial(self._thread_over, call))
            else:
                self._tasks.append(keep(asyncio.create_task(self._run(call))))
        limit = self._table.step_timeout_s
        if limit is not None and any(call.thread is not None for call in begun):
            self._timer = loop.call_later(limit, self._expire)

    async def next(self, at_least: int) -> list[MemberCall]:
        """Wait until so many calls are over, or all that are left; return them."""
        self._wanted = min(at_least, self._left)
        if len(self._finished) < self._wanted:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        finished, self._finished = self._finished, []
        self._left -= len(finished)
        return finished

    @property
    def over(self) -> bool:
        """Whether every call has been returned."""
        return not self._left

    def close(self) -> None:
        """Give up what is still under way; its sessions are to be ended."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        for call in self._calls:
            if call.outcome is None and call.thread is not None:
                self._abandon(call, call.thread)

    async def _run(self, call: MemberCall) -> None:
        try:
            outcome: Any = await call.member.session.run(call.play)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            outcome = RuntimeError(f"the environment cancelled its own call: {error}")
        except (Exception, SystemExit) as error:
            outcome = error
        self._finish(call, outcome)

    def _thread_over(self, call: MemberCall, waiter: asyncio.Future[tuple[bool, Any]]) -> None:
        if not waiter.cancelled():
            self._finish(call, waiter.result()[1])

    def _finish(self, call: MemberCall, outcome: Any) -> None:
        call.outcome = outcome
        call.member.busy = False
        self._finished.append(call)
        if len(self._finished) >= self._wanted and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        for call in self._calls:
            if call.outcome is None and call.thread is not None:
                thread = call.thread
                session = call.member.session
                self._finish(call, self._table.expire(session))
                self._abandon(call, thread)
                keep(asyncio.create_task(self._table.finish(session)))

    def _abandon(self, call: MemberCall, thread: Any) -> None:
        thread.waiter.cancel()
        call.member.session.runner.abandon(thread)
