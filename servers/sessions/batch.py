"""Batches: many sessions of one connection called together, each with its own lock, deadline, slot and errors."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CoroutineType
from typing import Any, Final

from openenv_core import Observation
from openenv_core.protocol.errors import SESSION_ERROR, VALIDATION_ERROR, RefusalError
from servers.execution import EnvironmentRunner, keep, start_eagerly
from servers.sessions.queue import REQUEST_WAIT_S, Tell, Ticket
from servers.sessions.session import EnvironmentSession, outcome_of_work
from servers.sessions.slots import SessionBusyError, UnknownSessionError
from servers.sessions.snapshots import SessionState, state_of
from servers.sessions.table import SessionTable
from servers.threads import Outcome, ThreadCall, outcome_of

_STEPS_PER_YIELD: Final = 64
"""Members stepped on the event loop before it is yielded to other tasks."""


@dataclass(slots=True, eq=False)
class Member:
    """One session of a batch.

    Attributes:
        number: Its number on the connection.
        session: The session.
        ended: Whether its episode is over and no new one has begun.
        busy: Whether a call of a batch is running.
        lock: Held by a request for this member alone; such requests run one at a time, in order.
    """

    number: int
    session: EnvironmentSession
    ended: bool = False
    busy: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def in_use(self) -> bool:
        """Whether a request is running."""
        return self.busy or self.lock.locked()

    def refusal(self) -> RefusalError | None:
        """Return why it cannot be called now; None if it can."""
        if self.in_use:
            return SessionBusyError(1)
        if self.session.over:
            return UnknownSessionError(f"member {self.number}, which has ended")
        return None


@dataclass(slots=True, eq=False)
class MemberCall:
    """One member's part of a batched request, and its outcome.

    Attributes:
        member: The member to call.
        options: The options of a reset.
        action: The action of a step. Without options and action, the call reads the state.
        autoreset: Which step resets a finished episode: `same_step`, `next_step`, or None for neither.
        outcome: What the call returned or raised.
        last: The last observation of the previous episode, if that ended in this call.
        spent_s: Seconds spent in the environment.
    """

    member: Member
    options: Mapping[str, Any] | None = None
    action: Any = None
    autoreset: str | None = None
    outcome: Any = None
    last: Any = None
    spent_s: float = 0.0

    @property
    def reads(self) -> bool:
        """Whether the call reads the state."""
        return self.options is None and self.action is None

    @property
    def resets(self) -> bool:
        """Whether a step resets instead, since the previous episode is over."""
        return self.member.ended and self.autoreset is not None

    async def play(self, runner: EnvironmentRunner, *, here: bool = False, result: Any = None) -> Any:
        """Read an environment's state, reset it, or step it and apply the autoreset mode.

        Args:
            runner: Runs the environment.
            here: Run methods in the calling thread, as of `EnvironmentRunner`.
            result: The result of `EnvironmentRunner.reset_here` or `step_here`, if already called.
        """
        if self.reads:
            return await runner.state(here=here)
        resets = self.options is not None or self.resets
        if result is None:
            result = runner.reset(self.options or {}) if resets else runner.step(self.action)
        observation = result if isinstance(result, Observation) else await result
        self.spent_s = runner.spent_s
        if not resets and self.autoreset == "same_step" and getattr(observation, "done", False) is True:
            self.last, observation = observation, await runner.reset({}, here=here)
            self.spent_s += runner.spent_s
        self.member.ended = getattr(observation, "done", False) is True
        return observation

    def play_here(self) -> Any:
        """Do the same in the calling thread; return a coroutine to continue on the event loop if a method waits."""
        member = self.member
        runner = member.session.runner
        if self.reads:
            return start_eagerly(self.play(runner, here=True))
        resets = self.options is not None or self.resets
        result = runner.reset_here(self.options or {}) if resets else runner.step_here(self.action)
        if isinstance(result, Observation):
            ended = result.done is True
            if (
                resets or not ended or self.autoreset != "same_step"
            ):  # the usual case, which creates no coroutine
                self.spent_s = runner.spent_s
                member.ended = ended
                return result
        return start_eagerly(self.play(runner, here=True, result=result))


class SessionBatch:
    """The sessions of one connection.

    Args:
        table: Opens the sessions.
        owner: Their owner.

    Attributes:
        members: Members that the client has not ended, by number.
        opened: Members opened so far; the number of the next one.
        forking: Members being forked.
    """

    def __init__(self, table: SessionTable, owner: str) -> None:
        self._table = table
        self._owner = owner
        self.members: dict[int, Member] = {}
        self.opened = self.forking = 0

    async def open(
        self, count: int, snapshot: str | None = None, tell: Tell | None = None, wait_s: float = math.inf
    ) -> list[Member]:
        """Open sessions, all or none, in the state of a snapshot if one is given.

        Args:
            count: Number of sessions.
            snapshot: Id of the snapshot.
            tell: Called with the place in the queue while there are too few slots.
            wait_s: Seconds to wait for the slots.

        Raises:
            RefusalError: CAPACITY_REACHED, FACTORY_ERROR, `UnknownSnapshotError`, or `DeadlineExceededError`.
        """
        if snapshot is None:
            return self.hold(await self._table.admit(self._ticket(count, wait_s), tell))
        with self._table.snapshots.use(self._owner, snapshot) as state:
            return await self._restore(state, self._ticket(count, wait_s), tell)

    async def fork(self, member: Member, count: int) -> list[Member]:
        """Open sessions in the state of a member, all or none.

        Raises:
            RefusalError: As `open`, and as `snapshot`.
        """
        self.forking += count
        try:
            state = await self._state_of(member)
            try:
                return await self._restore(state, self._ticket(count, REQUEST_WAIT_S))
            finally:
                await state.close()
        finally:
            self.forking -= count

    async def snapshot(self, member: Member) -> str:
        """Store the state of a member as a snapshot; return its id.

        Raises:
            RefusalError: The environment cannot be forked, or the server stores no more snapshots.
        """
        return self._table.snapshots.keep(self._owner, await self._state_of(member))

    async def end(self, members: Sequence[Member], snapshots: Sequence[str]) -> None:
        """End sessions and drop snapshots, all or none.

        Raises:
            RefusalError: A member is busy, or there is no such snapshot.
        """
        if any(member.in_use for member in members):
            raise SessionBusyError(1)
        self._table.snapshots.drop(self._owner, snapshots)
        for member in members:
            del self.members[member.number]
        await self._table.release([member.session for member in members])

    async def _state_of(self, member: Member) -> SessionState:
        if (refusal := member.refusal()) is not None:
            raise refusal
        member.busy = True
        try:
            return await state_of(member.session, ended=member.ended)
        finally:
            member.busy = False

    async def _restore(self, state: SessionState, ticket: Ticket, tell: Tell | None = None) -> list[Member]:
        members = self.hold(await self._table.admit(ticket, tell, state))
        for member in members:
            member.ended = state.ended
        return members

    def _ticket(self, count: int, wait_s: float) -> Ticket:
        return self._table.queue.enter(self._owner, count, wait_s)

    def hold(self, sessions: Sequence[EnvironmentSession]) -> list[Member]:
        """Add sessions as members, with the next numbers."""
        members = [Member(number, session) for number, session in enumerate(sessions, self.opened)]
        self.opened += len(members)
        self.members.update((member.number, member) for member in members)
        return members

    def find(self, numbers: Sequence[int] | None) -> list[Member]:
        """Return members by number, or all for None. RefusalError: There are none, or not all of these."""
        members, opened = self.members, self.opened
        if not opened:
            raise RefusalError(SESSION_ERROR, "expected sessions, got none; send a request `open` first")
        if numbers is None:
            return [*members.values()]
        if max(numbers) >= opened or len(set(numbers)) < len(numbers):
            raise RefusalError(
                VALIDATION_ERROR,
                f"expected members from 0 to {opened - 1}, each once, got {str(numbers)[:100]}",
            )
        for number in numbers:
            if number not in members:
                raise UnknownSessionError(f"member {number}, which has ended")
        return [members[number] for number in numbers]

    async def close(self) -> None:
        """End all sessions that belong to this connection only. This continues even if the caller is cancelled.

        A session whose deadline has expired is closed when its call ends.
        """
        sessions = [member.session for member in self.members.values()]
        await self._table.release([one for one in sessions if not one.standing and not one.over])


class BatchRound:
    """Concurrent calls of many members.

    Args:
        table: The table of their sessions.
        calls: One call per member.
    """

    def __init__(self, table: SessionTable, calls: Sequence[MemberCall]) -> None:
        self._table = table
        self._calls = calls
        self._finished: list[MemberCall] = []
        self._remaining = self._awaited = len(calls)
        self._waiter: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._thread_calls: dict[MemberCall, ThreadCall] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start the calls; those that never wait are done when this returns."""
        finished = self._finished
        for number, call in enumerate(self._calls, 1):
            member, session = call.member, call.member.session
            if call.outcome is None and (member.busy or session.over or member.lock.locked()):
                call.outcome = member.refusal()
            if call.outcome is not None:
                finished.append(call)
                continue
            if session.runner.plan.inline and not session.shared:
                outcome = outcome_of(call.play_here)
                if type(outcome[1]) is CoroutineType:
                    member.busy = True
                    self._finish(call, outcome)
                else:  # as in `_finish`, but without a waiter
                    call.outcome = outcome[1]
                    finished.append(call)
                if number % _STEPS_PER_YIELD == 0 and number < len(self._calls):
                    await asyncio.sleep(0)
                continue
            member.busy = True
            if session.shared:  # other clients may call it, so the call needs its lock
                self._run_in_task(call, call.play)
            elif session.runner.in_thread:
                self._thread_calls[call] = session.runner.submit(call.play_here, partial(self._finish, call))
            else:
                self._run_in_task(call, call.play)
        if self._thread_calls and self._table.step_timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._table.step_timeout_s, self._expire)

    async def next(self, at_least: int) -> list[MemberCall]:
        """Wait until at least this many calls, or all that remain, are done; return them."""
        self._awaited = min(at_least, self._remaining)
        if len(self._finished) < self._awaited:
            await asyncio.sleep(0)  # first of all, as `start_eagerly` requires
        if len(self._finished) < self._awaited:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        finished, self._finished = self._finished, []
        self._remaining -= len(finished)
        # All of them are returned in the order of the request.
        return finished if len(finished) < len(self._calls) else list(self._calls)

    @property
    def over(self) -> bool:
        """Whether every call has been returned."""
        return not self._remaining

    def cancel(self, refusal: RefusalError) -> None:
        """End calls that still wait for a thread with an error; the others continue."""
        for call, thread_call in list(self._thread_calls.items()):
            if call.member.session.runner.drop(thread_call):
                self._finish(call, (False, refusal))

    def close(self) -> None:
        """Abandon the calls that are still running; the caller has to end their sessions."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        # In reverse, since later calls would otherwise get the threads that earlier ones leave.
        for call, thread_call in reversed(self._thread_calls.items()):
            call.member.session.runner.abandon(thread_call)

    def _run_in_task(self, call: MemberCall, work: Callable[[EnvironmentRunner], Awaitable[Any]]) -> None:
        async def run() -> None:
            self._finish(call, await outcome_of_work(call.member.session.run_waiting(work)))

        self._tasks.append(keep(asyncio.create_task(run())))

    def _finish(self, call: MemberCall, outcome: Outcome) -> None:
        """Store a call's outcome, on the event loop; if that is an awaitable, continue with it."""
        if self._thread_calls:
            self._thread_calls.pop(call, None)
        _, value = outcome
        if isinstance(value, CoroutineType):
            self._run_in_task(call, lambda _: asyncio.create_task(value))
            return
        call.outcome = value
        call.member.busy = False
        self._finished.append(call)
        if self._waiter is not None and len(self._finished) >= self._awaited and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        for call, thread_call in reversed(list(self._thread_calls.items())):
            session = call.member.session
            session.runner.abandon(thread_call)
            self._finish(call, (False, self._table.expire(session)))
            self._table.drop(session)
