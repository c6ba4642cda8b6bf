"""The table of sessions: who may come in, and when a slot comes back.

A session is one environment and its identity; it knows no socket. Every request that needs an environment,
plain HTTP included, goes through here, so nothing bypasses the cap.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

from openenv_core.protocol.codes import CAPACITY_REACHED, FACTORY_ERROR, Refusal
from servers.execution import FATAL, Executor, Factory, Runner, plan_of

logger = logging.getLogger("servers")


class Session:
    """One environment under an identity of its own.

    Attributes:
        id: A uuid4.
        runner: The environment and where it runs.
    """

    __slots__ = ("id", "runner")

    def __init__(self, runner: Runner) -> None:
        self.id = str(uuid4())
        self.runner = runner


class SessionTable:
    """Hands out at most `cap` sessions at once.

    Args:
        factory: Makes an environment.
        cap: The greatest number of sessions.
        executor: Where the environments run.
    """

    def __init__(self, factory: Factory, cap: int, executor: Executor) -> None:
        self.factory = factory
        self.cap = cap
        self.executor = executor
        self._taken = 0
        self._sessions: dict[str, Session] = {}

    @property
    def inline(self) -> bool:
        """Whether every method of the environment runs on the loop without waiting."""
        return isinstance(self.factory, type) and plan_of(self.factory).inline

    @property
    def active(self) -> int:
        """Slots in use: sessions, those under construction, and those whose class cannot be left yet."""
        return self._taken

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Take a slot and an environment for as long as the block runs.

        Raises:
            Refusal: CAPACITY_REACHED or FACTORY_ERROR.
        """
        self._admit()
        try:
            session = await self._construct()
        except BaseException:
            self._taken -= 1
            raise
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            await self._end(session)

    def _admit(self) -> None:
        executor = self.executor
        counts = {"active_sessions": self._taken, "max_sessions": self.cap}
        if self._taken >= self.cap:
            raise Refusal(
                CAPACITY_REACHED,
                f"expected a free session, got {self._taken} of {self.cap} in use; try again later",
                counts,
            )
        if executor.abandoned >= executor.limit:
            raise Refusal(
                CAPACITY_REACHED,
                f"expected a free thread, got {executor.abandoned} held by calls whose clients have left; "
                "try again later, or restart the server if the environment hangs",
                counts,
            )
        self._taken += 1

    async def _construct(self) -> Session:
        name = getattr(self.factory, "__name__", type(self.factory).__name__)
        try:
            runner = await self.executor.construct(self.factory)
        except FATAL as error:
            logger.exception("constructing an environment with %s failed", name)
            raise Refusal(
                FACTORY_ERROR, str(error) or type(error).__name__, {"factory_name": name}
            ) from error
        if self.cap > 1 and not runner.concurrent:
            # Known only now: the factory is a function, whose class could not be asked beforehand.
            await runner.close()
            text = f"expected a class with SUPPORTS_CONCURRENT_SESSIONS = True for {self.cap} sessions, got one without"
            raise Refusal(FACTORY_ERROR, text, {"factory_name": name})
        return Session(runner)

    async def _end(self, session: Session) -> None:
        del self._sessions[session.id]
        runner = session.runner
        try:
            await runner.close()
        finally:
            if runner.concurrent:
                self._release()
            else:
                # Its class does not promise to share a process with a second instance, so the slot stays
                # taken until an abandoned call, and the closing, are over.
                runner.on_free(self._release)

    def _release(self) -> None:
        self._taken -= 1
