"""One session: an environment, its owner, its slot, and a queue of calls, each with a deadline."""

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final, Protocol

from openenv_core.protocol.errors import EXECUTION_ERROR, RefusalError, text_of
from openenv_core.watchdog import Watchdog
from servers.execution import (
    CLOSE_TIMEOUT_S,
    FATAL,
    AwaitedCall,
    EnvironmentCall,
    EnvironmentRunner,
    ResultCall,
    keep,
    pending_or_plain,
)
from servers.metrics import ServerMetrics
from servers.sessions.queue import SlotQueue
from servers.sessions.slots import SessionBusyError, SessionSlots, UnknownSessionError
from servers.sessions.snapshots import SessionState
from servers.threads import Outcome

MAX_WAITING: Final = 32
"""Calls that may wait for one session while another runs."""


class Phase(Enum):
    """Where a session is in its life.

    Attributes:
        OPEN: It takes calls.
        CLOSING: It takes calls, and ends when its WebSocket disconnects.
        ENDED: It takes no calls, and the table no longer finds it; its environment may be closing still.
    """

    OPEN = auto()
    CLOSING = auto()
    ENDED = auto()


class Slot:
    """A slot that has been granted, until it is released, which happens once.

    Attributes:
        taken_at: When it was granted, by the event loop's clock.
        held: Whether it has not been released.
    """

    __slots__ = ("_ending", "_owner", "_queue", "_slots", "held", "taken_at")

    def __init__(self, slots: SessionSlots, queue: SlotQueue, owner: str) -> None:
        self.taken_at = asyncio.get_running_loop().time()
        self.held = True
        self._slots = slots
        self._queue = queue
        self._owner = owner
        self._ending = False

    def mark_ending(self) -> None:
        """Let requests that wait know that it is about to be released."""
        if self.held and not self._ending:
            self._ending = True
            self._slots.add_ending(1)

    def release(self, *, was_used: bool = True) -> None:
        """Release it, if it is still held; `was_used`: its time counts for the estimate of how long others wait."""
        if not self.held:
            return
        self.held = False
        self._slots.release(self._owner)
        if self._ending:
            self._slots.add_ending(-1)
        if was_used:
            self._queue.record_return(asyncio.get_running_loop().time() - self.taken_at)
        else:
            self._queue.grant_slots()


class Attachment(Protocol):
    """A WebSocket, or what stands for it while it is broken, that uses a standing session."""

    async def detach(self) -> None:
        """Leave the session if the WebSocket is broken, since another client wants it."""


class _Table(Protocol):
    """The part of `SessionTable` that a session uses."""

    step_timeout_s: float | None
    metrics: ServerMetrics

    def expire(self, session: "EnvironmentSession") -> RefusalError:
        """End a session whose call exceeded its deadline; return the error for the call's caller."""


class EnvironmentSession:
    """One environment with an id and an owner, independent of the connection that it is used over.

    Attributes:
        runner: The environment and where it runs.
        metrics: Counts its calls.
        slot: Its slot, which may be released before its environment is closed.
        owner: Fingerprint of the token that opened it; empty if the server has no tokens.
        standing: Whether it lives until it is closed or idle for too long, rather than until the `with` block that
            opened it ends.
        id: Its id in the table, by which other clients may call it; empty if it was opened without one, until
            `SessionTable.assign_id`.
        phase: Where it is in its life.
        attachment: The WebSocket attached to a standing session.
        last_used_at: When its last call or attachment began or ended, by the event loop's clock; None before.
        listeners: Open requests beside its calls, such as streams; they keep it in use.
        on_end: Called once when it has ended.
    """

    def __init__(
        self, table: _Table, runner: EnvironmentRunner, slot: Slot, owner: str, session_id: str
    ) -> None:
        self.runner = runner
        self.metrics = table.metrics
        self.slot = slot
        self.owner = owner
        self.id = session_id
        self.standing = bool(session_id)
        self.phase = Phase.OPEN
        self.attachment: Attachment | None = None
        self.last_used_at: float | None = None
        self.listeners = 0
        self.on_end: Callable[[], None] | None = None
        self._table = table
        self._call: EnvironmentCall | None = None
        self._waiting: deque[EnvironmentCall] = deque()
        self._idle: asyncio.Future[None] | None = None  # done when no call runs
        self._watchdog = Watchdog(table.step_timeout_s, self._expire)

    @property
    def ended(self) -> bool:
        """Whether it takes no further calls."""
        return self.phase is Phase.ENDED

    @property
    def busy(self) -> bool:
        """Whether a call is running."""
        return self._call is not None

    @property
    def waiting_calls(self) -> int:
        """Number of calls that wait for others."""
        return len(self._waiting)

    def mark_used(self) -> None:
        """Record that it is used now."""
        self.last_used_at = asyncio.get_running_loop().time()

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no call runs, but not longer than this."""
        if self._call is not None and timeout_s > 0:
            self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._idle], timeout=timeout_s)

    def submit(self, call: EnvironmentCall) -> None:
        """Run a call after those before it, with a deadline; it is told its outcome, perhaps before this returns.

        If it cannot be run, its outcome is a RefusalError: `SessionBusyError`, `UnknownSessionError` (the session has
        ended), or `DeadlineExceededError`.
        """
        if self.phase is Phase.ENDED:
            call.deliver((False, UnknownSessionError(self.id)))
        elif self._call is None:
            self._call = call
            if self.id:
                self.mark_used()
            self.runner.start(call, self._end_call)
            if self._call is call:
                self._watchdog.start()
        elif len(self._waiting) >= MAX_WAITING:
            call.deliver((False, SessionBusyError(len(self._waiting))))
        else:
            self._waiting.append(call)

    def _end_call(self, call: EnvironmentCall, outcome: Outcome) -> None:
        """Deliver the outcome of the call, and begin the next one."""
        self._call = None
        if not call.on_loop or call.was_awaited:
            self._watchdog.stop()
        if self.id:
            self.mark_used()
        try:
            call.deliver(outcome)
        finally:
            if self._waiting:
                self._begin_next()
            if self._idle is not None and self._call is None and not self._idle.done():
                self._idle.set_result(None)

    def _begin_next(self) -> None:
        while self._waiting and self._call is None:
            call = self._waiting.popleft()
            self.submit(call)

    def _expire(self) -> None:
        """End the session, since its call has exceeded its deadline."""
        if self._call is not None:
            self.abandon_calls(self._table.expire(self))

    def abandon_calls(self, refusal: RefusalError) -> None:
        """End the running call, if any, with an error, and refuse those that wait; only when the session has ended."""
        assert self.ended
        self._watchdog.close()
        call, self._call = self._call, None
        if call is not None:
            self.runner.abandon(call)
            call.deliver((False, refusal))
        self._begin_next()

    def leave(self, call: EnvironmentCall) -> None:
        """Drop a call that waits for others, since its caller has gone; one that runs continues."""
        if call in self._waiting:
            self._waiting.remove(call)

    def withdraw(self, call: EnvironmentCall) -> bool:
        """Withdraw a call that has not started; return whether it had not."""
        if call is self._call:
            if not self.runner.drop_unstarted(call):
                return False
            self._call = None
            self._watchdog.stop()
            self._begin_next()
            return True
        if call in self._waiting:
            self._waiting.remove(call)
            return True
        return False

    async def perform(self, call: ResultCall) -> Any:
        """Submit a call and return its result.

        Where other clients may call the session, a call continues after its caller has disconnected.

        Raises:
            RefusalError: As the outcomes of `submit`.
            Exception: Whatever the environment raised.
        """
        self.submit(call)
        try:
            return await call.result
        except asyncio.CancelledError:
            if call.discard_result():
                raise
            self.leave(call)
            if call is self._call and not self.id:
                task = call.task
                self.runner.abandon(call)
                if task is not None:
                    await asyncio.wait([task], timeout=CLOSE_TIMEOUT_S)
            raise

    async def take_snapshot(self, *, episode_ended: bool) -> SessionState:
        """Return a snapshot of the environment.

        Raises:
            RefusalError: The environment cannot be forked, or its `snapshot` failed; or as `perform`.
        """
        runner = self.runner
        if not runner.forkable:
            raise RefusalError(
                EXECUTION_ERROR,
                f"expected an environment that can be forked, got {runner.name} without FORKABLE = True; see "
                "docs/tutorials/author.md",
            )

        def drop(state: Any) -> None:
            keep(asyncio.create_task(SessionState(state).close()))

        snapshot: Callable[[], Any] = runner.environment.snapshot
        try:
            state = await self.perform(
                AwaitedCall(lambda: pending_or_plain(snapshot()), runner.is_on_loop(snapshot), drop)
            )
        except FATAL as error:
            if isinstance(error, RefusalError):
                raise
            raise RefusalError(EXECUTION_ERROR, text_of(error)) from error
        return SessionState(state, episode_ended, runner.unscored)
