"""The table of sessions: opens them, finds them, and ends those that are idle."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias
from uuid import uuid4

from openenv_core.protocol.errors import (
    CAPACITY_REACHED,
    FACTORY_ERROR,
    SESSION_ERROR,
    RefusalError,
    text_of,
)
from servers.execution import FATAL, Executor, Factory, keep, name_of
from servers.metrics import ServerMetrics
from servers.seats import SeatEnvironment
from servers.sessions.queue import REQUEST_WAIT_S, Notify, Slot, SlotQueue, Ticket
from servers.sessions.session import Attachment, EnvironmentSession, Phase
from servers.sessions.slots import DeadlineExceededError, SessionSlots, UnknownSessionError
from servers.sessions.snapshots import SessionState, SnapshotTable
from servers.settings import ServerSettings
from servers.threads import ThreadPool

logger = logging.getLogger("servers")

UNUSED_SESSION_TTL_S: Final = 60.0
"""Idle timeout of a session that was opened and never called, in seconds."""

MAX_INTERVAL_S: Final = 5.0
"""Longest interval between two checks for idle sessions, in seconds."""

_MAX_BUILDS: Final = 16
"""Environments that one request constructs at once, so that other callers get the event loop and threads too."""

_Key: TypeAlias = tuple[str, str]
"""Owner and id: clients may choose ids, and one client's choice must reveal nothing about another's."""


def new_session_id() -> str:
    """Return an id that nobody can guess."""
    return str(uuid4())


def _stopping_error() -> RefusalError:
    return RefusalError(CAPACITY_REACHED, "the server is stopping; connect to another")


class SessionTable:
    """Opens sessions up to a cap, and finds and ends them.

    Args:
        slots: Counts sessions; by default those of this process only.
        new_id: Generates ids for sessions whose client chooses none.
        metrics: Counts events; disabled by default.

    Attributes:
        queue: Requests that wait for a slot.
        snapshots: Stored states of environments.
        new_id: Generates an id that routes to this process.
    """

    def __init__(
        self,
        factory: Factory,
        cap: int,
        executor: Executor,
        settings: ServerSettings | None = None,
        slots: SessionSlots | None = None,
        new_id: Callable[[], str] = new_session_id,
        metrics: ServerMetrics | None = None,
    ) -> None:
        settings = settings or ServerSettings()
        self.metrics = metrics or ServerMetrics(name_of(factory), enabled=False)
        self.factory = factory
        self.executor = executor
        self.slots: SessionSlots = slots or SessionSlots(cap, settings.max_sessions_per_token)
        self.metrics.slots = self.slots
        self.step_timeout_s = settings.step_timeout_s
        self.queue = SlotQueue(self.slots, settings.max_waiting, settings.max_wait_s)
        self.queue.get_refusal = self._get_refusal
        self.queue.on_grant = self.metrics.count_granted
        self._draining = False
        self.new_id = new_id
        self._sessions: dict[_Key, EnvironmentSession] = {}
        self._opening: dict[_Key, tuple[Ticket, asyncio.Future[None]]] = {}
        self._idle_timeout_s = settings.idle_timeout_s
        self._reaper: asyncio.Task[None] | None = None
        self.snapshots = SnapshotTable(settings.idle_timeout_s, settings.max_sessions_per_token, new_id)

    @property
    def deterministic(self) -> bool:
        """Whether the environment declares that the seed and the actions determine its episodes."""
        return getattr(self.factory, "DETERMINISTIC", False) is True

    @property
    def active(self) -> int:
        """Slots in use: by sessions open, under construction, or ended but still holding their slot."""
        return self.slots.active

    @property
    def draining(self) -> bool:
        """Whether new sessions are refused. Setting it also refuses every request in the queue."""
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        if draining:
            self.queue.refuse_all(_stopping_error)

    @property
    def standing(self) -> list[EnvironmentSession]:
        """The sessions that live until they are closed or idle for too long."""
        return [session for session in self._sessions.values() if session.standing]

    # Opening and finding

    @asynccontextmanager
    async def session(
        self, owner: str = "", *, wait_s: float = REQUEST_WAIT_S, ticket: Ticket | None = None
    ) -> AsyncIterator[EnvironmentSession]:
        """Open a session for the duration of a `with` block, and end it afterwards.

        Args:
            owner: The session's owner.
            wait_s: Seconds to wait for a slot.
            ticket: A place in the queue that the caller already has, in place of `owner` and `wait_s`.

        Raises:
            RefusalError: CAPACITY_REACHED, FACTORY_ERROR, or `DeadlineExceededError`.
        """
        session = await self._admit(ticket or self.queue.enter(owner, wait_s=wait_s))
        try:
            yield session
        finally:
            await asyncio.shield(self.drop(session))

    async def open(
        self, owner: str, session_id: str | None = None, *, wait_s: float = REQUEST_WAIT_S
    ) -> EnvironmentSession:
        """Open a session that lives until it is closed or idle for too long.

        Args:
            owner: The session's owner.
            session_id: An id chosen by the client, which none of its sessions has; by default a new one.
            wait_s: Seconds to wait for a slot.

        Raises:
            RefusalError: CAPACITY_REACHED, FACTORY_ERROR, or `DeadlineExceededError`.
        """
        key = (owner, session_id or self.new_id())
        ticket = self.queue.enter(owner, wait_s=wait_s)
        opening_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opening[key] = ticket, opening_done
        try:
            session = self._sessions[key] = await self._admit(ticket, key[1])
        finally:
            del self._opening[key]
            opening_done.set_result(None)
        if self._reaper is None or self._reaper.done():
            self._reaper = asyncio.create_task(self._reap(), name="reaper of idle sessions")
        return session

    async def find_or_open(
        self, owner: str, session_id: str, *, wait_s: float = REQUEST_WAIT_S
    ) -> EnvironmentSession:
        """Return the owner's session of this id, or open it; concurrent calls open it once.

        Raises:
            RefusalError: As `open`.
        """
        clock = asyncio.get_running_loop().time
        started_at, wait_s = clock(), self.queue.clamp_wait(wait_s)
        while (opening := self._opening.get((owner, session_id))) is not None:
            ticket, opening_done = opening
            # Once its slot is granted, the construction of the environment has a deadline of its own.
            await asyncio.wait([ticket.granted], timeout=max(0.0, started_at + wait_s - clock()))
            if ticket.is_waiting:
                raise self.queue.refusal_of(ticket, clock() - started_at)
            await asyncio.shield(opening_done)
        left_s = started_at + wait_s - clock()
        return self._sessions.get((owner, session_id)) or await self.open(owner, session_id, wait_s=left_s)

    def find(self, owner: str, session_id: object) -> EnvironmentSession:
        """Return the owner's session of this id.

        Raises:
            RefusalError: `UnknownSessionError`.
        """
        session = self._sessions.get((owner, session_id)) if isinstance(session_id, str) else None
        if session is None:
            raise UnknownSessionError(str(session_id))
        return session

    def assign_id(self, session: EnvironmentSession) -> str:
        """Return a session's id, after giving it one and making it findable by its owner if it had none."""
        if not session.id and not session.ended:
            session.id = self.new_id()
            self._sessions[session.owner, session.id] = session
        return session.id

    @asynccontextmanager
    async def attach(
        self, owner: str, session_id: str, attachment: Attachment
    ) -> AsyncIterator[EnvironmentSession]:
        """Attach a WebSocket to a standing session for the duration of a `with` block; the session outlives it.

        Raises:
            RefusalError: The session is unknown, still being opened, or has another WebSocket attached.
        """
        if (owner, session_id) in self._opening:
            raise RefusalError(SESSION_ERROR, f"Session {session_id} is still initializing; retry shortly")
        session = self.find(owner, session_id)
        if session.attachment is not None:
            await session.attachment.detach()
        if session.ended:
            raise UnknownSessionError(session_id)
        if session.attachment is not None or not session.standing:
            raise RefusalError(SESSION_ERROR, f"Session {session_id} already has an attached WebSocket")
        session.attachment = attachment
        session.mark_used()
        try:
            yield session
        finally:
            session.attachment = None
            session.mark_used()
            if session.phase is Phase.CLOSING:
                self.drop(session)

    # Ending

    def expire(self, session: EnvironmentSession) -> DeadlineExceededError:
        """End a session whose call exceeded its deadline, and free its slot at once, even if its class allows only one.

        Returns:
            The error for the call's caller.
        """
        logger.error("%s took longer than %g s; its session is ended", session.name, self.step_timeout_s)
        self._remove(session)
        session.slot.release()
        self.drop(session)
        return DeadlineExceededError(self.step_timeout_s)

    async def close(self, session: EnvironmentSession) -> bool:
        """End a session and cancel its call.

        Returns:
            False if a WebSocket is attached: the session then ends when that disconnects.
        """
        if session.attachment is not None:
            await session.attachment.detach()
        if session.attachment is not None or not (session.standing or session.ended):
            session.phase = Phase.CLOSING
            return False
        await asyncio.shield(self.drop(session))
        return True

    def drop(self, session: EnvironmentSession) -> asyncio.Task[None]:
        """End a session; the table no longer finds it.

        Returns:
            The task that closes its environment and frees its slot; await it shielded, so that it runs to its end.
        """
        self._remove(session)
        return keep(asyncio.create_task(self._finish(session)))

    async def _reap(self) -> None:
        """End standing sessions that are idle for too long, until none is left.

        A session with a WebSocket, another open connection or a call in progress is not idle.
        """
        while standing := self.standing:
            unused_timeout_s = min(self._idle_timeout_s, UNUSED_SESSION_TTL_S)
            await asyncio.sleep(min(MAX_INTERVAL_S, max(0.01, unused_timeout_s / 4)))
            now = asyncio.get_running_loop().time()
            for session in standing:
                used_at, timeout_s = session.last_used_at, self._idle_timeout_s
                if used_at is None:
                    used_at, timeout_s = session.slot.taken_at, unused_timeout_s
                in_use = session.attachment or session.listeners or session.busy or session.ended
                if not in_use and now - used_at > timeout_s:
                    logger.info("session %s was idle for too long and is ended", session.id)
                    try:
                        self.drop(session)
                    except Exception:
                        logger.exception("session %s could not be ended", session.id)

    async def end_standing(self, deadline: float) -> None:
        """End every standing session, after the call in progress if that ends before the deadline.

        Args:
            deadline: By the event loop's clock.
        """
        await asyncio.gather(*(self._end_after_call(session, deadline) for session in self.standing))

    async def shut_down(self) -> None:
        """End all standing sessions and drop all snapshots; for when the server stops."""
        if self._reaper is not None:
            self._reaper.cancel()
        await self.snapshots.close()
        await self.end_standing(0.0)

    async def _end_after_call(self, session: EnvironmentSession, deadline: float) -> None:
        self._remove(session)
        await session.wait_idle(deadline - asyncio.get_running_loop().time())
        await asyncio.shield(self.drop(session))

    async def admit(
        self, ticket: Ticket, notify: Notify | None = None, state: SessionState | None = None
    ) -> list[EnvironmentSession]:
        """Open as many sessions as a ticket asks for, all of them or none; `release` ends them.

        Args:
            ticket: A place in the queue.
            notify: Called with the place and its changes while the ticket waits.
            state: The state to restore the environments to, if any.

        Raises:
            RefusalError: As `session`.
        """
        slots = await self._take_slots(ticket, notify)
        builds: list[asyncio.Task[EnvironmentSession]] = []
        try:
            while slots:
                # Build one alone first, so that a failing constructor fails once. With a state, it has worked before.
                size = min(_MAX_BUILDS, len(slots)) if builds or state is not None else 1
                tasks = [
                    keep(asyncio.create_task(self._build(slots.pop(), ticket.owner, "", state)))
                    for _ in range(size)
                ]
                builds += tasks
                await asyncio.wait(tasks)
                for task in tasks:
                    task.result()
        except BaseException:
            for slot in slots:
                slot.release(was_used=False)
            for task in builds:
                if self._shares_process:
                    task.cancel()
                task.add_done_callback(self._drop_built)
            raise
        return [task.result() for task in builds]

    async def release(self, sessions: Sequence[EnvironmentSession]) -> None:
        """End sessions that `admit` returned. This continues even if the caller is cancelled."""
        if sessions:
            await asyncio.wait([self.drop(session) for session in sessions])

    @property
    def _shares_process(self) -> bool:
        return self.slots.cap > 1 or bool(getattr(self.factory, "SUPPORTS_CONCURRENT_SESSIONS", False))

    async def _take_slots(self, ticket: Ticket, notify: Notify | None = None) -> list[Slot]:
        await ticket.wait_granted(notify)
        return [Slot(self.slots, self.queue, ticket.owner) for _ in range(ticket.count)]

    async def _admit(self, ticket: Ticket, session_id: str = "") -> EnvironmentSession:
        (slot,) = await self._take_slots(ticket)
        if self._shares_process:
            return await self._build(slot, ticket.owner, session_id)
        # The class does not promise that two instances can share a process, so the constructor keeps its slot until
        # it returns or its deadline passes, even if its caller has disconnected.
        build = keep(asyncio.create_task(self._build(slot, ticket.owner, session_id)))
        try:
            return await asyncio.shield(build)
        except asyncio.CancelledError:
            build.add_done_callback(self._drop_built)
            raise

    def _get_refusal(self) -> RefusalError | None:
        """Return why all new sessions are refused, however long they wait; None if they are not."""
        if self._draining:
            return _stopping_error()
        if self.executor.is_exhausted:
            return RefusalError(
                CAPACITY_REACHED,
                f"no free thread: {self.executor.abandoned} are held by abandoned calls; try again later, or "
                "restart the server if the environment hangs",
                {"active_sessions": self.active, "max_sessions": self.slots.cap},
            )
        return None

    def _drop_built(self, build: asyncio.Task[EnvironmentSession]) -> None:
        if not build.cancelled() and build.exception() is None:
            self.drop(build.result())

    async def _build(
        self, slot: Slot, owner: str, session_id: str, state: SessionState | None = None
    ) -> EnvironmentSession:
        """Construct the environment of a session that has a slot; release the slot on failure."""
        name = name_of(self.factory)

        def discard(environment: Any, pool: ThreadPool) -> None:
            EnvironmentSession(self, environment, pool, slot, owner, session_id).discard()

        deadline = asyncio.timeout(self.step_timeout_s)
        session: EnvironmentSession | None = None
        try:
            async with deadline:
                environment, pool = await self.executor.construct(self.factory, discard)
                session = EnvironmentSession(self, environment, pool, slot, owner, session_id)
                if self.slots.cap > 1 and not session.concurrent:
                    # The factory is a function, so the class is known only now.
                    text = (
                        f"expected a class with SUPPORTS_CONCURRENT_SESSIONS = True for {self.slots.cap} sessions, "
                        "got one without"
                    )
                    raise RefusalError(FACTORY_ERROR, text, {"factory_name": name})
                if state is not None:
                    await state.restore(session)
            if isinstance(environment, SeatEnvironment):  # a player that stalls holds no slot
                environment.on_absence = lambda: self.drop(session)
            self.metrics.counts.opened_sessions += 1
            return session
        except BaseException as error:
            if session is None:
                slot.release(was_used=False)
            else:
                await asyncio.shield(self.drop(session))
            if not isinstance(error, FATAL) or isinstance(error, RefusalError):
                raise
            if deadline.expired():
                raise DeadlineExceededError(self.step_timeout_s) from None
            logger.exception("constructing an environment with %s failed", name)
            raise RefusalError(FACTORY_ERROR, text_of(error), {"factory_name": name}) from error

    def _remove(self, session: EnvironmentSession) -> None:
        session.phase = Phase.ENDED
        key = (session.owner, session.id)
        if self._sessions.get(key) is session:  # another may have been opened under its id
            del self._sessions[key]
        on_end, session.on_end = session.on_end, None
        if on_end is not None:
            on_end()

    async def _finish(self, session: EnvironmentSession) -> None:
        slot = session.slot
        slot.mark_ending()
        session.abandon_calls(UnknownSessionError(session.id))
        try:
            await session.close_environment()
        finally:
            if session.concurrent:
                slot.release()
            elif slot.held:
                # The class does not promise that two instances can share a process, so the slot stays taken until
                # an abandoned call and `close` have ended, but no longer than the time limit of a call.
                session.on_free(slot.release)
                if slot.held and self.step_timeout_s is not None:
                    asyncio.get_running_loop().call_later(self.step_timeout_s, slot.release)
