"""Batches: many sessions of one connection called together, each with its own lock, deadline, slot and errors."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

from openenv_core import Observation
from openenv_core.pending import Pending
from openenv_core.protocol.errors import SESSION_ERROR, VALIDATION_ERROR, RefusalError
from servers.sessions.queue import REQUEST_WAIT_S, Notify, Ticket
from servers.sessions.session import EnvironmentCall, EnvironmentSession
from servers.sessions.slots import SessionBusyError, UnknownSessionError
from servers.sessions.snapshots import SessionState
from servers.sessions.table import SessionTable
from servers.threads import Outcome

_YIELD_INTERVAL_S: Final = 0.005
"""Seconds of calls on the event loop after which it is yielded to other tasks."""

_CALLS_PER_LOOK: Final = 4
"""Calls after which the clock is read."""


_DONE: Final = bool


@dataclass(slots=True, eq=False)
class Member:
    """One session of a batch.

    Attributes:
        number: Its number on the connection.
        session: The session.
        episode_ended: Whether its episode is over and no new one has begun.
        in_batch: Whether it has a call of a batch that has not ended.
    """

    number: int
    session: EnvironmentSession
    episode_ended: bool = False
    in_batch: bool = False

    def get_refusal(self) -> RefusalError | None:
        """Return why it cannot be called in a batch now; None if it can."""
        session = self.session
        if self.in_batch or (session.busy and not session.id):
            return SessionBusyError(1)
        if session.ended:
            return UnknownSessionError(f"member {self.number}, which has ended")
        return None


class MemberCall(EnvironmentCall):
    """One member's part of a batched request, and its outcome.

    Args:
        member: The member to call.
        encode: Encodes what the environment returns, before any environment is called again: it may return an object
            that a later call changes.
        options: The options of a reset.
        action: The action of a step. Without options and action, the call reads the state.
        autoreset: Which step resets a finished episode: `same_step`, `next_step`, or None for neither.

    Attributes:
        outcome: What the call returned, encoded; or what it raised.
        final: The last observation of the previous episode, encoded, if that ended in this call.
        spent_s: Seconds spent in the environment.
        round: Told when the call has ended.
    """

    __slots__ = (
        "_is_reset",
        "action",
        "autoreset",
        "encode",
        "final",
        "member",
        "options",
        "outcome",
        "round",
        "spent_s",
    )

    round: "BatchRound"

    def __init__(
        self,
        member: Member,
        encode: Callable[[Any], Any],
        options: Mapping[str, Any] | None = None,
        action: Any = None,
        autoreset: str | None = None,
    ) -> None:
        super().__init__(self._play, on_loop=True)
        plan = member.session.plan
        self.member = member
        self.encode = encode
        self.options = options
        self.action = action
        self.autoreset = autoreset
        self.outcome: Any = None
        self.final: Any = None
        self.spent_s = 0.0
        self._is_reset = options is not None or (autoreset is not None and member.episode_ended)
        if self._is_reset:
            self.on_loop = plan.reset_on_loop
        else:
            self.on_loop = plan.on_loop if action is None else plan.step_on_loop

    @property
    def is_read(self) -> bool:
        """Whether the call reads the state."""
        return self.options is None and self.action is None

    @property
    def autoresets(self) -> bool:
        """Whether a step resets instead, since the previous episode is over."""
        return self.member.episode_ended and self.autoreset is not None

    def _play(self) -> Any:
        """Read an environment's state, reset it, or step it and apply the autoreset mode, wherever this runs."""
        session = self.member.session
        if self.is_read:
            return self.encode(session.read_state())
        result = (
            session.invoke_reset(self.options or {}) if self._is_reset else session.invoke_step(self.action)
        )
        if isinstance(result, Pending):
            return Pending(result, self._finish_awaited)
        encoded = self._take(result)
        if not self._resets_after(result):
            return encoded
        self.final = encoded
        again = session.invoke_reset({})
        return Pending(again, self._take) if isinstance(again, Pending) else self._take(again)

    def _finish_awaited(self, observation: Any) -> Any:
        """Go on after an asynchronous method; a reset that follows it may run in a thread."""
        encoded = self._take(observation)
        if not self._resets_after(observation):
            return encoded
        self.final = encoded
        session = self.member.session
        return Pending(session.run(partial(session.invoke_reset, {}), session.plan.reset_on_loop), self._take)

    def _take(self, observation: Any) -> Any:
        """Encode an observation, and keep what it says about the episode."""
        self.spent_s += self.member.session.spent_s
        self.member.episode_ended = isinstance(observation, Observation) and observation.done is True
        return self.encode(observation)

    def _resets_after(self, observation: Any) -> bool:
        return self.member.episode_ended and self.autoreset == "same_step" and not self._is_reset

    def deliver(self, outcome: Outcome) -> None:
        """Keep the outcome, and count the call as done."""
        self.work = _DONE  # it refers to the call, which would be left to the garbage collector
        self.outcome = outcome[1]
        self.member.in_batch = False
        self.round.add(self)


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
        if any(member.in_batch or member.session.busy for member in members):
            raise SessionBusyError(1)
        self._table.snapshots.drop(self._owner, snapshots)
        for member in members:
            del self.members[member.number]
        await self._table.release([member.session for member in members])

    async def _state_of(self, member: Member) -> SessionState:
        if (refusal := member.get_refusal()) is not None:
            raise refusal
        return await SessionState.take(member.session, episode_ended=member.episode_ended)

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
        calls: One call per member.
        min_count: Number of calls that are answered together.
        on_finished: Called with calls that have ended: `min_count` of them, or all that remain.
        on_started: Called once every call has been submitted to its session.
    """

    def __init__(
        self,
        calls: Sequence[MemberCall],
        min_count: int,
        on_finished: Callable[[list[MemberCall]], None],
        on_started: Callable[[], None],
    ) -> None:
        self._calls = calls
        self._min_count = min_count
        self._on_finished = on_finished
        self._on_started = on_started
        self._finished: list[MemberCall] = []
        self._submitted = 0
        self._remaining = len(calls)
        self._closed = False

    @property
    def is_done(self) -> bool:
        """Whether every call has been handed over."""
        return not self._remaining

    def start(self) -> None:
        """Submit the calls; if those on the event loop take long, other tasks get their turns in between."""
        calls, submitted = self._calls, self._submitted
        yield_at = perf_counter() + _YIELD_INTERVAL_S
        while submitted < len(calls) and not self._closed:
            call = calls[submitted]
            submitted += 1
            call.round = self
            refusal = call.member.get_refusal() if call.outcome is None else call.outcome
            if refusal is None:
                call.member.in_batch = True
                call.member.session.submit(call)
            else:
                call.outcome = refusal
                self._finished.append(call)
            if not submitted % _CALLS_PER_LOOK and perf_counter() >= yield_at and submitted < len(calls):
                self._submitted = submitted
                asyncio.get_running_loop().call_soon(self.start)
                return
        self._submitted = submitted
        self._hand_over()
        self._on_started()

    def add(self, call: MemberCall) -> None:
        """Take a call that has ended."""
        self._finished.append(call)
        if self._submitted == len(self._calls):
            self._hand_over()

    def _hand_over(self) -> None:
        finished = self._finished
        if not finished or len(finished) < min(self._min_count, self._remaining) or self._closed:
            return
        self._finished = []
        self._remaining -= len(finished)
        # All of them are handed over in the order of the request.
        self._on_finished(finished if len(finished) < len(self._calls) else list(self._calls))

    def cancel(self, refusal: RefusalError) -> None:
        """End calls that have not begun with an error; the others continue."""
        for call in self._calls:
            if call.outcome is None and not call.member.in_batch:
                call.outcome = refusal  # not submitted yet
            elif call.outcome is None and call.member.session.withdraw(call):
                call.deliver((False, refusal))

    def close(self) -> None:
        """Hand nothing over any more."""
        self._closed = True
