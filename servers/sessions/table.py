"""The table of sessions: who may come in, when a slot comes back, and the end of those that nobody uses."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias
from uuid import uuid4

from openenv_core.protocol.errors import CAPACITY_REACHED, FACTORY_ERROR, SESSION_ERROR, RefusalError, text_of
from servers.execution import (
    CLOSE_TIMEOUT_S,
    FATAL,
    Executor,
    Factory,
    keep,
    name_of,
    plan_of,
)
from servers.metrics import ServerMetrics
from servers.sessions.queue import REQUEST_WAIT_S, SlotQueue, Tell, Ticket
from servers.sessions.session import EnvironmentSession
from servers.sessions.slots import DeadlineExceededError, SessionSlots, UnknownSessionError
from servers.sessions.snapshots import SessionState, SnapshotTable
from servers.settings import ServerSettings

logger = logging.getLogger("servers")

UNUSED_SESSION_TTL_S: Final = 60.0
"""Seconds that a session is kept which was opened and then never asked for anything."""

MAX_INTERVAL_S: Final = 5.0
"""Between two looks for sessions that nobody uses."""


_WAVE: Final = 16
"""Environments of one caller that are built at once: others have their turn on the loop and in the threads."""

_Key: TypeAlias = tuple[str, str]
"""Owner and id: ids may be chosen by callers, and one caller's choice must tell nothing of another's."""


def _stopping() -> RefusalError:
    return RefusalError(
        CAPACITY_REACHED, "expected a server that stays, got one that is stopping; connect to another"
    )


class SessionTable:
    """Hands out sessions, up to a cap.

    Args:
        slots: Counts sessions; by default those of this process alone.
        new_id: Draws the ids that callers do not choose themselves.
        metrics: Counts what happens; by default apart, for nobody.

    Attributes:
        queue: Who waits for a slot.
        snapshots: States that are kept.
        new_id: Draws an id that leads to this process.
    """

    def __init__(
        self,
        factory: Factory,
        cap: int,
        executor: Executor,
        settings: ServerSettings | None = None,
        slots: SessionSlots | None = None,
        new_id: Callable[[], str] = lambda: str(uuid4()),
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
        self.queue.refusal = self._refusal
        self.queue.on_grant = self.metrics.count_admitted
        self._draining = False
        self.new_id = new_id
        self._sessions: dict[_Key, EnvironmentSession] = {}
        self._opening: dict[_Key, tuple[Ticket, asyncio.Future[None]]] = {}
        self._idle_s = settings.idle_timeout_s
        self._reaper: asyncio.Task[None] | None = None
        self.snapshots = SnapshotTable(settings.idle_timeout_s, settings.max_sessions_per_token, new_id)

    @property
    def inline(self) -> bool:
        """Whether every method of the environment runs on the loop without waiting."""
        return isinstance(self.factory, type) and plan_of(self.factory).inline

    @property
    def deterministic(self) -> bool:
        """Whether the environment says that the seed and the actions decide everything."""
        return getattr(self.factory, "DETERMINISTIC", False) is True

    @property
    def active(self) -> int:
        """Slots in use: sessions, those under construction, and those whose class cannot be left yet."""
        return self.slots.active

    @property
    def draining(self) -> bool:
        """Whether no further session is taken; those who wait for one are told as it begins."""
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        if draining:
            self.queue.refuse_all(_stopping)

    @property
    def standing(self) -> list[EnvironmentSession]:
        """The sessions that stand by themselves."""
        return [session for session in self._sessions.values() if session.standing]

    # Coming

    @asynccontextmanager
    async def session(
        self, owner: str = "", *, wait_s: float = REQUEST_WAIT_S, ticket: Ticket | None = None
    ) -> AsyncIterator[EnvironmentSession]:
        """Take a slot and an environment for as long as the block runs.

        It waits for a slot, unless the caller has a place in the queue already.

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
        """Open a session that stands by itself.

        Args:
            owner: Whose it is.
            session_id: An id of the caller's choice, which none of the caller's sessions has.
            wait_s: Seconds to wait for a slot.

        Raises:
            RefusalError: CAPACITY_REACHED, FACTORY_ERROR, or `DeadlineExceededError`.
        """
        key = (owner, session_id or self.new_id())
        ticket = self.queue.enter(owner, wait_s=wait_s)
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opening[key] = ticket, opened
        try:
            session = self._sessions[key] = await self._admit(ticket, key[1])
        finally:
            del self._opening[key]
            opened.set_result(None)
        session.last_use = asyncio.get_running_loop().time()
        if self._reaper is None or self._reaper.done():
            self._reaper = asyncio.create_task(self._reap(), name="reaper of idle sessions")
        return session

    async def find_or_open(
        self, owner: str, session_id: str, *, wait_s: float = REQUEST_WAIT_S
    ) -> EnvironmentSession:
        """Return the caller's session of this id, opened now where there was none, by one of those who ask at once.

        Raises:
            RefusalError: As `open`.
        """
        clock = asyncio.get_running_loop().time
        began, wait_s = clock(), self.queue.clamp_wait(wait_s)
        while (opening := self._opening.get((owner, session_id))) is not None:
            ticket, opened = opening
            # Who has a slot has another deadline to make its environment.
            await asyncio.wait([ticket.granted], timeout=max(0.0, began + wait_s - clock()))
            if ticket.waits:
                raise self.queue.refusal_of(ticket, clock() - began)
            await asyncio.shield(opened)
        left_s = began + wait_s - clock()
        return self._sessions.get((owner, session_id)) or await self.open(owner, session_id, wait_s=left_s)

    def find(self, owner: str, session_id: object) -> EnvironmentSession:
        """Return the caller's session of this id.

        Raises:
            RefusalError: `UnknownSessionError`.
        """
        session = self._sessions.get((owner, session_id)) if isinstance(session_id, str) else None
        if session is None:
            raise UnknownSessionError(str(session_id))
        return session

    def hand_out(self, session: EnvironmentSession) -> str:
        """Return the id of a session, under which its owner finds it from now on."""
        if not session.id and not session.over:
            session.id = self.new_id()
            session.shared = True
            self._sessions[session.owner, session.id] = session
        return session.id

    @asynccontextmanager
    async def attach(self, owner: str, session_id: str) -> AsyncIterator[EnvironmentSession]:
        """Speak for a session that stands by itself for as long as the block runs; it outlives the block.

        Raises:
            RefusalError: It is unknown, not ready, or somebody speaks for it already.
        """
        if (owner, session_id) in self._opening:
            raise RefusalError(SESSION_ERROR, f"Session {session_id} is still initializing; retry shortly")
        session = self.find(owner, session_id)
        if session.let_go is not None:
            await session.let_go()
        if session.over:
            raise UnknownSessionError(session_id)
        if session.attached:
            raise RefusalError(SESSION_ERROR, f"Session {session_id} already has an attached WebSocket")
        session.attached = session.used = True
        try:
            yield session
        finally:
            session.attached = False
            session.last_use = asyncio.get_running_loop().time()
            if session.closing and not session.over:
                self.drop(session)

    # Going

    def expire(self, session: EnvironmentSession) -> DeadlineExceededError:
        """End a session whose environment takes too long; its slot is free at once, whatever its class asks for."""
        logger.error(
            "%s took longer than %g s; its session is ended", session.runner.name, self.step_timeout_s
        )
        self._forget(session)
        self._release(session)
        return DeadlineExceededError(self.step_timeout_s)

    async def close(self, session: EnvironmentSession) -> bool:
        """End a session, and with it the call that is under way; return False where its socket has to leave first."""
        if session.attached:
            session.closing = True
            return False
        await asyncio.shield(self.drop(session))
        return True

    def drop(self, session: EnvironmentSession) -> asyncio.Task[None]:
        """End a session: nobody finds it from now on.

        Returns:
            What closes its environment and gives its slot back. It goes on when whoever waits for it is cancelled.
        """
        self._forget(session)
        return keep(asyncio.create_task(self._finish(session)))

    async def _reap(self) -> None:
        """End standing sessions that go unused, for as long as there are any.

        One that has a socket or another open connection, or whose call is under way, is in use.
        """
        while standing := self.standing:
            shortest = min(self._idle_s, UNUSED_SESSION_TTL_S)
            await asyncio.sleep(min(MAX_INTERVAL_S, max(0.01, shortest / 4)))
            now = asyncio.get_running_loop().time()
            for session in standing:
                limit = self._idle_s if session.used else shortest
                in_use = session.attached or session.listeners or session.busy or session.over
                if not in_use and now - session.last_use > limit:
                    logger.info("session %s went unused for too long; it is ended", session.id)
                    try:
                        self.drop(session)
                    except Exception:
                        logger.exception("session %s could not be ended", session.id)

    async def end_standing(self, deadline: float) -> None:
        """End every session that stands by itself, after its call where that comes to an end in time.

        Args:
            deadline: On the loop's clock.
        """
        await asyncio.gather(*(self._end_after_call(session, deadline) for session in self.standing))

    async def shut_down(self) -> None:
        """End what is left when the server stops."""
        if self._reaper is not None:
            self._reaper.cancel()
        await self.snapshots.close()
        await self.end_standing(0.0)

    async def _end_after_call(self, session: EnvironmentSession, deadline: float) -> None:
        self._forget(session)
        if session.call is not None:
            remaining = deadline - asyncio.get_running_loop().time()
            await asyncio.wait([session.call.task], timeout=max(0.0, remaining))
        await asyncio.shield(self.drop(session))

    async def admit(
        self, ticket: Ticket, tell: Tell | None = None, state: SessionState | None = None
    ) -> list[EnvironmentSession]:
        """Take slots and environments, all of them or none; `release` gives them back.

        Args:
            ticket: Of the queue.
            tell: Told the place in it, while that has to be waited for.
            state: What the environments are restored to.

        Raises:
            RefusalError: As `session`.
        """
        owner, count = ticket.owner, ticket.count
        await ticket.take(tell)
        building: list[asyncio.Task[EnvironmentSession]] = []
        try:
            while len(building) < count:
                # One at first: a class that cannot be made says so once. One with a state has been made before.
                size = min(_WAVE, count - len(building)) if building or state is not None else 1
                wave = [keep(asyncio.create_task(self._build(owner, "", state))) for _ in range(size)]
                building += wave
                await asyncio.wait(wave)
                for one in wave:
                    one.result()
        except BaseException:
            for _ in range(count - len(building)):
                self._give(owner)
            for one in building:
                if self._shares_process:
                    one.cancel()
                one.add_done_callback(self._drop_built)
            raise
        return [one.result() for one in building]

    async def release(self, sessions: Sequence[EnvironmentSession]) -> None:
        """End sessions that `admit` has returned. Whoever waits may be cancelled: it goes on."""
        if sessions:
            await asyncio.wait([self.drop(session) for session in sessions])

    @property
    def _shares_process(self) -> bool:
        return self.slots.cap > 1 or bool(getattr(self.factory, "SUPPORTS_CONCURRENT_SESSIONS", False))

    async def _admit(self, ticket: Ticket, session_id: str = "") -> EnvironmentSession:
        owner = ticket.owner
        await ticket.take()
        if self._shares_process:
            return await self._build(owner, session_id)
        # Its class does not promise to share a process with a second instance: the constructor keeps its slot to its
        # end, or its deadline, when its caller has left.
        building = keep(asyncio.create_task(self._build(owner, session_id)))
        try:
            return await asyncio.shield(building)
        except asyncio.CancelledError:
            building.add_done_callback(self._drop_built)
            raise

    def _refusal(self) -> RefusalError | None:
        """Return why no newcomer is taken, however long it waits; None where that is not so."""
        if self._draining:
            return _stopping()
        if self.executor.exhausted:
            return RefusalError(
                CAPACITY_REACHED,
                f"expected a free thread, got {self.executor.abandoned} held by calls whose clients have left or "
                "whose time was over; try again later, or restart the server if the environment hangs",
                {"active_sessions": self.active, "max_sessions": self.slots.cap},
            )
        return None

    def _give(self, owner: str) -> None:
        self.slots.give(owner)
        self.queue.wake()

    def _drop_built(self, building: asyncio.Task[EnvironmentSession]) -> None:
        if not building.cancelled() and building.exception() is None:
            self.drop(building.result())

    async def _build(
        self, owner: str, session_id: str, state: SessionState | None = None
    ) -> EnvironmentSession:
        """Construct the environment of a session whose slot has been taken; give the slot back where that fails."""
        name = name_of(self.factory)
        deadline = asyncio.timeout(self.step_timeout_s)
        session: EnvironmentSession | None = None
        try:
            async with deadline:
                runner = await self.executor.construct(self.factory)
                session = EnvironmentSession(self, runner, owner, session_id)
                if self.slots.cap > 1 and not runner.concurrent:
                    # Known only now: the factory is a function, whose class could not be asked beforehand.
                    text = (
                        f"expected a class with SUPPORTS_CONCURRENT_SESSIONS = True for {self.slots.cap} sessions, "
                        "got one without"
                    )
                    raise RefusalError(FACTORY_ERROR, text, {"factory_name": name})
                if state is not None:
                    await state.restore(runner)
            self.metrics.counts.opened += 1
            return session
        except BaseException as error:
            if session is None:
                self._give(owner)
            else:
                await asyncio.shield(self.drop(session))
            if not isinstance(error, FATAL) or isinstance(error, RefusalError):
                raise
            if deadline.expired():
                raise DeadlineExceededError(self.step_timeout_s) from None
            logger.exception("constructing an environment with %s failed", name)
            raise RefusalError(FACTORY_ERROR, text_of(error), {"factory_name": name}) from error

    def _forget(self, session: EnvironmentSession) -> None:
        session.over = True
        key = (session.owner, session.id)
        if self._sessions.get(key) is session:  # or somebody has opened another under its id meanwhile
            del self._sessions[key]
        told, session.on_over = session.on_over, None
        if told is not None:
            told()

    async def _finish(self, session: EnvironmentSession) -> None:
        if session.holds_slot and not session.ending:
            session.ending = True
            self.slots.end(1)
        runner, call = session.runner, session.call
        if call is not None:
            if call.expired:
                return  # it has this done when it ends at last
            call.task.cancel()
            await asyncio.wait([call.task], timeout=CLOSE_TIMEOUT_S)
        try:
            await runner.close()
        finally:
            if runner.concurrent:
                self._release(session)
            elif session.holds_slot:
                # Its class does not promise to share a process with a second instance, so the slot stays taken
                # until an abandoned call, and the closing, are over; but no longer than a call may take.
                runner.on_free(lambda: self._release(session))
                if session.holds_slot and self.step_timeout_s is not None:
                    asyncio.get_running_loop().call_later(self.step_timeout_s, self._release, session)

    def _release(self, session: EnvironmentSession) -> None:
        if session.holds_slot:
            session.holds_slot = False
            self.slots.give(session.owner)
            if session.ending:
                self.slots.end(-1)
            self.queue.returned(asyncio.get_running_loop().time() - session.began)
