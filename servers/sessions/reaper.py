"""Ends sessions that stand by themselves and that nobody uses."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from servers.sessions.session import Session

logger = logging.getLogger("servers")

UNUSED_S = 60.0
"""Seconds that a session is kept which was opened and then never asked for anything."""

MAX_INTERVAL_S = 5.0
LOOKS = 4
"""How often it looks within the time that a session may go unused."""


class Reaper:
    """Looks after standing sessions for as long as there are any.

    It never touches one that has a socket or another open connection, or whose call is under way.

    Args:
        standing: Returns the sessions that stand by themselves.
        drop: Ends one.
        idle_s: Seconds that a session may go unused.
    """

    def __init__(
        self, standing: Callable[[], Sequence[Session]], drop: Callable[[Session], None], idle_s: float
    ) -> None:
        self._standing = standing
        self._drop = drop
        self._idle_s = idle_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on, unless it does already."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="reaper of idle sessions")
            self._task.add_done_callback(_notice)

    def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        interval = min(MAX_INTERVAL_S, max(0.01, min(self._idle_s, UNUSED_S) / LOOKS))
        while standing := self._standing():
            await asyncio.sleep(interval)
            now = asyncio.get_running_loop().time()
            for session in standing:
                if self._unused(session, now):
                    logger.info("session %s went unused for too long; it is ended", session.id)
                    self._drop(session)

    def _unused(self, session: Session, now: float) -> bool:
        if session.attached or session.listeners or session.busy or session.over:
            return False
        limit = self._idle_s if session.used else min(self._idle_s, UNUSED_S)
        return now - session.last_use > limit


def _notice(task: asyncio.Task[None]) -> None:
    """Say that the reaper has died; the next session that is opened starts another."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the reaper of idle sessions has died", exc_info=error)
