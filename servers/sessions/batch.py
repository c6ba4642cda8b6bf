"""Many sessions of one caller, asked together: each keeps its turn, its deadline and its slot, and fails by itself."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from openenv_core.protocol.errors import RefusalError
from servers.execution import FATAL, EnvironmentRunner, keep
from servers.sessions.queue import REQUEST_WAIT_S, Tell, Ticket
from servers.sessions.session import EnvironmentSession
from servers.sessions.slots import SessionBusyError, UnknownSessionError
from servers.sessions.snapshots import SessionState, state_of
from servers.sessions.table import SessionTable
from servers.threads import ThreadPool

_SPELL: Final = 64
"""Members that are stepped on the loop before others have their turn."""

_TICK_S: Final = 0.002
"""Between two looks at calls that wait for a thread."""

_LONG_S: Final = 0.0005
"""A call that takes longer is worth another thread."""

_USEFUL: Final = 1.3
"""How much more has to be done a second for threads to have been of use: those that only compute take turns."""


class Member:
    """One session of a batch.

    Attributes:
        session: The session.
        ended: Its episode is over, and no other has begun.
        busy: A call of a batch is under way.
        turn: Who asks it alone has this: one request at a time, in their order.
    """

    __slots__ = ("busy", "ended", "number", "session", "turn")

    def __init__(self, number: int, session: EnvironmentSession) -> None:
        self.number = number
        self.session = session
        self.ended = self.busy = False
        self.turn = asyncio.Lock()


class MemberCall:
    """What one member is asked, and what came of it.

    Attributes:
        member: Whom.
        outcome: What it returned, and the last observation of the episode before it if that ended here; or what was
            raised.
        begun: The environment is asked, or was.
    """

    __slots__ = ("_action", "_autoreset", "_options", "begun", "member", "outcome")

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
        self.begun = False
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
        if self._options is not None or self.resets:
            return self._note(await runner.reset(self._options or {})), None
        seen = self._note(await runner.step(self._action))
        if self._autoreset == "same_step" and self.member.ended:
            return self._note(await runner.reset({})), seen
        return seen, None

    def play_here(self) -> None:
        """Do the same where it is called, with an environment whose methods are plain; keep the outcome."""
        runner = self.member.session.runner
        try:
            if self.reads:
                self.outcome = runner.state_here(), None
            elif self._options is not None or self.resets:
                self.outcome = self._note(runner.reset_here(self._options or {})), None
            else:
                seen = self._note(runner.step_here(self._action))
                if self._autoreset == "same_step" and self.member.ended:
                    self.outcome = self._note(runner.reset_here({})), seen
                else:
                    self.outcome = seen, None
        except FATAL as error:
            self.outcome = error

    def _note(self, seen: Any) -> Any:
        self.member.ended = getattr(seen, "done", False) is True
        return seen


class SessionBatch:
    """The sessions of one connection.

    Args:
        table: Where they come from.
        owner: Whose they are.
    """

    def __init__(self, table: SessionTable, owner: str) -> None:
        self._table = table
        self._owner = owner
        self.members: list[Member] = []

    async def open(
        self, count: int, snapshot: str | None = None, tell: Tell | None = None, wait_s: float = math.inf
    ) -> list[Member]:
        """Open sessions, all or none; in the state of a snapshot, where there is to be one.

        Args:
            count: How many.
            snapshot: Its id.
            tell: Told the place in the queue, while there are not as many slots.
            wait_s: Seconds to wait for them.

        Raises:
            RefusalError: CAPACITY_REACHED, FACTORY_ERROR, `UnknownSnapshotError`, or `DeadlineExceededError`.
        """
        if snapshot is None:
            return self._hold(await self._table.admit(self._ticket(count, wait_s), tell))
        with self._table.snapshots.use(self._owner, snapshot) as state:
            return await self._restore(state, self._ticket(count, wait_s), tell)

    async def fork(self, member: Member, count: int) -> list[Member]:
        """Open sessions in the state of a member, all or none.

        Raises:
            RefusalError: As `open`, and as `snapshot`.
        """
        state = await self._state_of(member)
        try:
            return await self._restore(state, self._ticket(count, REQUEST_WAIT_S))
        finally:
            await state.close()

    async def snapshot(self, member: Member) -> str:
        """Keep the state of a member; return its id.

        Raises:
            RefusalError: The environment cannot be forked, or the server keeps as many as it may.
        """
        return self._table.snapshots.keep(self._owner, await self._state_of(member))

    async def end(self, members: Sequence[Member], snapshots: Sequence[str]) -> None:
        """End some sessions, and drop snapshots.

        Raises:
            RefusalError: A member is busy, or there is no such snapshot; nothing is ended then.
        """
        if any(member.busy or member.turn.locked() for member in members):
            raise SessionBusyError(1)
        self._table.snapshots.drop(self._owner, snapshots)
        await self._table.release([member.session for member in members])

    async def _state_of(self, member: Member) -> SessionState:
        if member.busy or member.turn.locked():
            raise SessionBusyError(1)
        if member.session.over:
            raise UnknownSessionError(f"member {member.number}, which has ended")
        member.busy = True
        try:
            return await state_of(member.session, ended=member.ended)
        finally:
            member.busy = False

    async def _restore(self, state: SessionState, ticket: Ticket, tell: Tell | None = None) -> list[Member]:
        members = self._hold(await self._table.admit(ticket, tell, state))
        for member in members:
            member.ended = state.ended
        return members

    def _ticket(self, count: int, wait_s: float) -> Ticket:
        return self._table.queue.enter(self._owner, count, wait_s)

    def _hold(self, sessions: Sequence[EnvironmentSession]) -> list[Member]:
        begun = len(self.members)
        self.members += [Member(begun + number, session) for number, session in enumerate(sessions)]
        return self.members[begun:]

    async def close(self) -> None:
        """End them all. Whoever waits may be cancelled: it goes on."""
        await self._table.release([member.session for member in self.members if not member.session.standing])


class _Job:
    """One thread that takes calls, one after the other.

    Attributes:
        thread: Where the pool has it.
        call: What it is at, since `began`.
        left: It was given up, and takes no other call.
    """

    __slots__ = ("began", "call", "left", "thread")

    def __init__(self) -> None:
        self.thread: Any = None
        self.call: MemberCall | None = None
        self.began = 0.0
        self.left = False


class BatchRound:
    """Calls of many members, under way at once.

    Calls that run in threads share one, for a thread costs more than most calls; the longer they take, the more threads
    come to help.

    Args:
        table: Of their sessions.
        calls: One a member.
    """

    def __init__(self, table: SessionTable, calls: Sequence[MemberCall]) -> None:
        self._limit_s = table.step_timeout_s
        self._table = table
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._finished: deque[MemberCall] = deque()
        self._left = len(calls)
        self._wanted, self._woken = len(calls), True
        self._waiter: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._seen, self._looked, self._rate = 0, time.monotonic(), 0.0
        self._lock = threading.Lock()
        self._queues: dict[ThreadPool, tuple[deque[MemberCall], list[_Job]]] = {}  # under the lock

    async def start(self) -> None:
        """Begin; calls that never wait are over when it returns."""
        spell = 0
        for call in self._calls:
            member, session = call.member, call.member.session
            if call.outcome is None and (member.busy or member.turn.locked()):
                call.outcome = SessionBusyError(1)
            elif call.outcome is None and session.over:
                call.outcome = UnknownSessionError(f"member {member.number}, which has ended")
            if call.outcome is not None:
                self._finished.append(call)
                continue
            member.busy = call.begun = True
            runner = session.runner
            if runner.plan.inline:
                call.play_here()
                self._finished.append(call)
                spell += 1
                if spell % _SPELL == 0:
                    await asyncio.sleep(0)
            elif runner.in_thread:
                self._queues.setdefault(runner.pool, (deque(), []))[0].append(call)
            else:
                self._tasks.append(keep(asyncio.create_task(self._run(call))))
        for pool in self._queues:
            self._add_job(pool)
        if self._queues:
            self._timer = self._loop.call_later(_TICK_S, self._look)

    async def next(self, at_least: int) -> list[MemberCall]:
        """Wait until so many calls are over, or all that are left; return them."""
        self._waiter = waiter = self._loop.create_future()
        self._wanted, self._woken = min(at_least, self._left), False
        if len(self._finished) < self._wanted:
            await waiter
        finished = [self._finished.popleft() for _ in range(len(self._finished))]
        for call in finished:
            if call.begun:
                call.member.busy = False
        self._left -= len(finished)
        return finished

    @property
    def over(self) -> bool:
        """Whether every call has been returned."""
        return not self._left

    def cancel(self, refusal: RefusalError) -> None:
        """Do not begin what still waits for a thread; the others go on."""
        for calls, _ in self._queues.values():
            with self._lock:
                waiting = list(calls)
                calls.clear()
            for call in waiting:
                call.outcome = refusal
                self._finish(call)

    def close(self) -> None:
        """Give up what is still under way; its sessions are to be ended."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        for calls, jobs in self._queues.values():
            with self._lock:  # or a thread would be between taking a call and saying so
                calls.clear()
                under_way = [(job, job.call) for job in jobs]
            for job, call in under_way:
                self._abandon(job, call)

    async def _run(self, call: MemberCall) -> None:
        try:
            call.outcome = await call.member.session.run(call.play)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            call.outcome = RuntimeError(f"the environment cancelled its own call: {error}")
        except FATAL as error:
            call.outcome = error
        self._finish(call)

    def _finish(self, call: MemberCall) -> None:
        """Note that a call is over; from any thread."""
        self._finished.append(call)
        if len(self._finished) >= self._wanted and not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # a closed loop: nobody waits any more
                self._loop.call_soon_threadsafe(self._wake, self._waiter)

    def _wake(self, waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # In threads

    def _add_job(self, pool: ThreadPool) -> None:
        job = _Job()
        self._queues[pool][1].append(job)
        job.thread = pool.submit(partial(self._work, job, self._queues[pool][0]))

    def _work(self, job: _Job, calls: deque[MemberCall]) -> None:
        call: MemberCall | None = None
        while True:
            with self._lock:
                if job.left:
                    return  # and what became of its call is told already
                job.call = following = calls.popleft() if calls else None
                job.began = time.monotonic()
            if call is not None:
                self._finish(call)
            if (call := following) is None:
                return
            call.play_here()

    def _look(self) -> None:
        """End what takes too long, and have others help with what waits."""
        now, limit_s = time.monotonic(), math.inf if self._limit_s is None else self._limit_s
        soonest = math.inf
        for pool, (calls, jobs) in self._queues.items():
            with self._lock:
                under_way = [(job, job.call, job.began) for job in jobs if job.call is not None]
                waiting = len(calls)
            for job, call, began in under_way:
                if now - began >= limit_s:
                    self._expire(job, call)
                else:
                    soonest = min(soonest, began + limit_s - now)
            if waiting:
                running = sum(not job.left for job in jobs)
                for _ in range(min(waiting, pool.size - running, self._help(now, running))):
                    self._add_job(pool)
                soonest = min(soonest, _TICK_S if running < pool.size else limit_s)
        if soonest < math.inf:
            self._timer = self._loop.call_later(soonest, self._look)

    def _help(self, now: float, running: int) -> int:
        """Return how many threads could help: as many again, where calls take long and the last helpers were of use."""
        over = len(self._calls) - self._left + len(self._finished)
        rate = (over - self._seen) / max(now - self._looked, 1e-9)
        self._seen, self._looked = over, now
        if not running:
            return 1
        if rate * _LONG_S > running or 0 < rate < _USEFUL * self._rate:
            return 0
        self._rate = rate
        return running

    def _expire(self, job: _Job, call: MemberCall) -> None:
        if self._abandon(job, call):
            session = call.member.session
            # A call of its own, since the thread may still write its outcome into the other.
            over = MemberCall(call.member)
            over.begun, over.outcome = True, self._table.expire(session)
            self._finish(over)
            keep(asyncio.create_task(self._table.finish(session)))

    def _abandon(self, job: _Job, call: MemberCall | None) -> bool:
        """Give a job up that is at this call; return whether it is."""
        with self._lock:
            if call is None or job.call is not call:
                return False
            job.left, job.call = True, None
        call.member.session.runner.abandon(job.thread)
        return True
