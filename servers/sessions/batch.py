"""Batches: many sessions of one connection called together, each with its own lock, deadline, slot and errors."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from types import CoroutineType
from typing import Any, Final

from openenv_core import Observation
from openenv_core.protocol.errors import SESSION_ERROR, VALIDATION_ERROR, RefusalError
from servers.execution import EnvironmentRunner, keep, start_eagerly
from servers.sessions.queue import REQUEST_WAIT_S, Notify, Ticket
from servers.sessions.slots import SessionBusyError, UnknownSessionError
from servers.sessions.snapshots import SessionState
from servers.sessions.table import EnvironmentSession, SessionTable, outcome_of_work
from servers.threads import Outcome, ThreadCall, outcome_of

_YIELD_INTERVAL_S: Final = 0.005
"""Seconds of calls on the event loop after which it is yielded to other tasks."""


@dataclass(slots=True, eq=False)
class Member:
    """One session of a batch.

    Attributes:
        number: Its number on the connection.
        session: The session.
        episode_ended: Whether its episode is over and no new one has begun.
        busy: Whether a call of a batch is running.
        lock: Held by a request for this member alone; such requests run one at a time, in order.
        waiting: Number of requests that wait for the lock; the first of them has it next, also if it is free.
    """

    number: int
    session: EnvironmentSession
    episode_ended: bool = False
    busy: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0

    @property
    def in_use(self) -> bool:
        """Whether a request is running or waiting."""
        return self.busy or self.lock.locked() or self.waiting > 0

    def get_refusal(self) -> RefusalError | None:
        """Return why it cannot be called now; None if it can."""
        if self.in_use:
            return SessionBusyError(1)
        if self.session.ended:
            return UnknownSessionError(f"member {self.number}, which has ended")
        return None


@dataclass(slots=True, eq=False)
class MemberCall:
    """One member's part of a batched request, and its outcome.

    Attributes:
        member: The member to call.
        encode: Encodes what the environment returns, before any environment is called again: it may return an object
            that a later call changes.
        options: The options of a reset.
        action: The action of a step. Without options and action, the call reads the state.
        autoreset: Which step resets a finished episode: `same_step`, `next_step`, or None for neither.
        outcome: What the call returned, encoded; or what it raised.
        final: The last observation of the previous episode, encoded, if that ended in this call.
        spent_s: Seconds spent in the environment.
    """

    member: Member
    encode: Callable[[Any], Any]
    options: Mapping[str, Any] | None = None
    action: Any = None
    autoreset: str | None = None
    outcome: Any = None
    final: Any = None
    spent_s: float = 0.0

    @property
    def is_read(self) -> bool:
        """Whether the call reads the state."""
        return self.options is None and self.action is None

    @property
    def autoresets(self) -> bool:
        """Whether a step resets instead, since the previous episode is over."""
        return self.member.episode_ended and self.autoreset is not None

    async def play(self, runner: EnvironmentRunner, *, inline: bool = False, result: Any = None) -> Any:
        """Read an environment's state, reset it, or step it and apply the autoreset mode.

        Args:
            runner: Runs the environment.
            inline: Run methods in the calling thread, as of `EnvironmentRunner`.
            result: The result of `EnvironmentRunner.reset_inline` or `step_inline`, if already called.
        """
        if self.is_read:
            return self.encode(await runner.state(inline=inline))
        is_reset = self.options is not None or self.autoresets
        if result is None:
            result = runner.reset(self.options or {}) if is_reset else runner.step(self.action)
        observation = result if isinstance(result, Observation) else await result
        self.spent_s = runner.spent_s
        ended = self.member.episode_ended = getattr(observation, "done", False) is True
        encoded = self.encode(observation)
        if ended and not is_reset and self.autoreset == "same_step":
            observation = await runner.reset({}, inline=inline)
            self.spent_s += runner.spent_s
            self.member.episode_ended = getattr(observation, "done", False) is True
            self.final, encoded = encoded, self.encode(observation)
        return encoded

    def play_inline(self) -> Any:
        """Do the same in the calling thread; return a coroutine to continue on the event loop if a method waits."""
        member = self.member
        runner = member.session.runner
        if self.is_read:
            return start_eagerly(self.play(runner, inline=True))
        is_reset = self.options is not None or self.autoresets
        result = runner.reset_inline(self.options or {}) if is_reset else runner.step_inline(self.action)
        if isinstance(result, Observation):
            ended = result.done is True
            if (
                is_reset or not ended or self.autoreset != "same_step"
            ):  # the usual case, which creates no coroutine
                self.spent_s = runner.spent_s
                member.episode_ended = ended
                return self.encode(result)
        return start_eagerly(self.play(runner, inline=True, result=result))


class SessionBatch:
    """The sessions of one connection.

    Args:
        table: Opens the sessions.
        owner: Their owner.

    Attributes:
        members: Members that the client has not ended, by number.
        opened_count: Members opened so far; the number of the next one.
        forking_count: Members being forked.
    """

    def __init__(self, table: SessionTable, owner: str) -> None:
        self._table = table
        self._owner = owner
        self.members: dict[int, Member] = {}
        self.opened_count = self.forking_count = 0

    async def open(
        self, count: int, snapshot: str | None = None, notify: Notify | None = None, wait_s: float = math.inf
    ) -> list[Member]:
        """Open sessions, all or none, in the state of a snapshot if one is given.

        Args:
            count: Number of sessions.
            snapshot: Id of the snapshot.
            notify: Called with the place in the queue while there are too few slots.
            wait_s: Seconds to wait for the slots.

        Raises:
            RefusalError: CAPACITY_REACHED, FACTORY_ERROR, `UnknownSnapshotError`, or `DeadlineExceededError`.
        """
        if snapshot is None:
            return self.add(await self._table.admit(self._enter_queue(count, wait_s), notify))
        with self._table.snapshots.use(self._owner, snapshot) as state:
            return await self._restore(state, self._enter_queue(count, wait_s), notify)

    async def fork(self, member: Member, count: int) -> list[Member]:
        """Open sessions in the state of a member, all or none.

        Raises:
            RefusalError: As `open`, and as `snapshot`.
        """
        self.forking_count += count
        try:
            state = await self._state_of(member)
            try:
                return await self._restore(state, self._enter_queue(count, REQUEST_WAIT_S))
            finally:
                await state.close()
        finally:
            self.forking_count -= count

    async def snapshot(self, member: Member) -> str:
        """Store the state of a member as a snapshot; return its id.

        Raises:
            RefusalError: The environment cannot be forked, or the server stores no more snapshots.
        """
        return self._table.snapshots.store(self._owner, await self._state_of(member))

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
        if (refusal := member.get_refusal()) is not None:
            raise refusal
        member.busy = True
        try:
            return await member.session.take_snapshot(episode_ended=member.episode_ended)
        finally:
            member.busy = False

    async def _restore(
        self, state: SessionState, ticket: Ticket, notify: Notify | None = None
    ) -> list[Member]:
        members = self.add(await self._table.admit(ticket, notify, state))
        for member in members:
            member.episode_ended = state.episode_ended
        return members

    def _enter_queue(self, count: int, wait_s: float) -> Ticket:
        return self._table.queue.enter(self._owner, count, wait_s)

    def add(self, sessions: Sequence[EnvironmentSession]) -> list[Member]:
        """Add sessions as members, with the next numbers."""
        members = [Member(number, session) for number, session in enumerate(sessions, self.opened_count)]
        self.opened_count += len(members)
        self.members.update((member.number, member) for member in members)
        return members

    def find(self, numbers: Sequence[int] | None) -> list[Member]:
        """Return members by number, or all for None. RefusalError: There are none, or not all of these."""
        members, opened_count = self.members, self.opened_count
        if not opened_count:
            raise RefusalError(SESSION_ERROR, "the connection has no sessions; send a request `open` first")
        if numbers is None:
            return [*members.values()]
        if max(numbers) >= opened_count or len(set(numbers)) < len(numbers):
            raise RefusalError(
                VALIDATION_ERROR,
                f"expected members from 0 to {opened_count - 1}, each once, got {str(numbers)[:100]}",
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
        await self._table.release([one for one in sessions if not one.standing and not one.ended])


class BatchRound:
    """Concurrent calls of many members.

    Args:
        table: The table of their sessions.
        calls: One call per member.
    """

    def __init__(self, table: SessionTable, calls: Sequence[MemberCall]) -> None:
        self._table = table
        self._calls = calls
        self._finished_calls: list[MemberCall] = []
        self._remaining_count = self._awaited_count = len(calls)
        self._waiter: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._thread_calls: dict[MemberCall, ThreadCall] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start the calls; those that never wait are done when this returns."""
        finished = self._finished_calls
        yield_at = perf_counter() + _YIELD_INTERVAL_S
        for call in self._calls:
            member, session = call.member, call.member.session
            if call.outcome is None and (
                member.busy or session.ended or member.lock.locked() or member.waiting
            ):
                call.outcome = member.get_refusal()
            if call.outcome is not None:
                finished.append(call)
                continue
            if session.runner.plan.inline and not session.shared:
                outcome = outcome_of(call.play_inline)
                if type(outcome[1]) is CoroutineType:
                    member.busy = True
                    self._finish(call, outcome)
                else:  # as in `_finish`, but without a waiter
                    call.outcome = outcome[1]
                    finished.append(call)
                if perf_counter() >= yield_at:
                    await asyncio.sleep(0)
                    yield_at = perf_counter() + _YIELD_INTERVAL_S
                continue
            member.busy = True
            if session.shared:  # other clients may call it, so the call needs its lock
                self._run_in_task(call, call.play)
            elif session.runner.in_thread:
                self._thread_calls[call] = session.runner.submit(
                    call.play_inline, partial(self._finish, call)
                )
            else:
                self._run_in_task(call, call.play)
        if self._thread_calls and self._table.step_timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._table.step_timeout_s, self._expire)

    async def wait_finished(self, min_count: int) -> list[MemberCall]:
        """Wait until at least this many calls, or all that remain, are done; return them."""
        self._awaited_count = min(min_count, self._remaining_count)
        if len(self._finished_calls) < self._awaited_count:
            await asyncio.sleep(0)  # first of all, as `start_eagerly` requires
        if len(self._finished_calls) < self._awaited_count:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        finished, self._finished_calls = self._finished_calls, []
        self._remaining_count -= len(finished)
        # All of them are returned in the order of the request.
        return finished if len(finished) < len(self._calls) else list(self._calls)

    @property
    def is_done(self) -> bool:
        """Whether every call has been returned."""
        return not self._remaining_count

    def cancel(self, refusal: RefusalError) -> None:
        """End calls that still wait for a thread with an error; the others continue."""
        for call, thread_call in list(self._thread_calls.items()):
            if call.member.session.runner.cancel_unstarted(thread_call):
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
        self._finished_calls.append(call)
        if (
            self._waiter is not None
            and len(self._finished_calls) >= self._awaited_count
            and not self._waiter.done()
        ):
            self._waiter.set_result(None)

    def _expire(self) -> None:
        for call, thread_call in reversed(list(self._thread_calls.items())):
            session = call.member.session
            session.runner.abandon(thread_call)
            self._finish(call, (False, self._table.expire(session)))
            self._table.drop(session)
