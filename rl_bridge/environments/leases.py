"""Sessions on one or several environment servers, lent to one episode at a time."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from openenv_core.errors import CapacityError
from rl_bridge.environments.pool import Connect, SessionPool, shut
from rl_bridge.environments.session import LeasedSession, SessionDeadlines
from rl_bridge.errors import SessionUnavailableError
from rl_bridge.metrics.spans import span


@dataclass(kw_only=True, slots=True, frozen=True)
class LeaseCounts:
    """How the sessions of a worker stand; the first three together are always the bound.

    Attributes:
        free: Sessions that an episode could have.
        lent: Sessions that an episode has, or waits for a server to open.
        closing: Sessions that nobody may have yet.
        idle: Open sessions that nobody uses.
        opened: Sessions opened, since the beginning.
        discarded: Sessions given up after a failure, since the beginning.
        failed: Attempts to open one that failed, since the beginning.
    """

    free: int
    lent: int
    closing: int
    idle: int
    opened: int
    discarded: int
    failed: int


class SessionLeases:
    """A bounded number of sessions over the servers of a list that may change at any time.

    A session is opened when it is needed, on the server where this worker has the fewest in use, and kept for the
    next episode. One whose episode failed is closed, and the next episode gets a fresh one. A server that cannot be
    reached is left alone for a while that grows; while there is none to be had at all, who asks for a session waits
    for one within the deadline.

    Bound to the event loop that it is used on.

    Args:
        connect: Makes a client.
        sessions: Sessions at most, over all servers.
        deadlines: Of every wait.
        urls: The servers; none where `replace` tells them later.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        sessions: int,
        deadlines: SessionDeadlines | None = None,
        urls: Sequence[str] = (),
    ) -> None:
        if sessions < 1:
            raise ValueError(f"expected at least one session, got {sessions}")
        self._sessions = sessions
        self._deadlines = deadlines or SessionDeadlines()
        self._pool = SessionPool(connect, limit=sessions, deadlines=self._deadlines)
        self._places = asyncio.BoundedSemaphore(sessions)
        self._leased: set[LeasedSession] = set()
        self._free, self._closing, self._discarded = sessions, 0, 0
        self.replace(urls)

    @property
    def counts(self) -> LeaseCounts:
        """How the sessions stand."""
        return LeaseCounts(
            free=self._free,
            lent=self._sessions - self._free - self._closing,
            closing=self._closing,
            idle=self._pool.idle,
            opened=self._pool.opened,
            discarded=self._discarded,
            failed=self._pool.failed,
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers that sessions are opened on."""
        return self._pool.urls

    def replace(self, urls: Sequence[str]) -> None:
        """Take another list of servers. Sessions in use on others are finished, and not kept after that.

        Must be called on the event loop where sessions are in use.

        Args:
            urls: The servers that serve now, also those known before; what failed there is forgotten.
        """
        self._pool.replace(urls)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[LeasedSession]:
        """Have a session to oneself for the length of the block.

        It is kept for the next one, unless a request failed or the block is left by an exception.

        Raises:
            SessionUnavailableError: None was to be had within the deadlines.
            openenv_core.AuthenticationError: The server wants a token, or another one; also `AccessRefusedError`.
            openenv_core.ClientError: The server refuses sessions for a reason that will not pass.
            RolloutError: The leases were closed.
        """
        with span("lease", waits_for="session"):
            await self._take_place()
            try:
                session = LeasedSession(
                    *await self._pool.obtain(),
                    deadlines=self._deadlines,
                    learn=self._pool.learn,
                    exchange=self._exchange,
                )
            except BaseException:
                self._give_place_back()
                raise
        self._leased.add(session)
        sound = False
        try:
            yield session
            sound = not session.broken
        finally:
            self._leased.discard(session)
            self._return(session, sound=sound)

    async def close(self) -> None:
        """Close every session. Those in use break; who waits for one is told."""
        await asyncio.gather(self._pool.close(), *(shut(session.client) for session in self._leased))

    async def _take_place(self) -> None:
        try:
            async with asyncio.timeout(self._deadlines.free_s) as timeout:
                await self._places.acquire()
        except TimeoutError:
            if not timeout.expired():
                raise
            raise SessionUnavailableError(
                f"expected one of {self._sessions} sessions to be free within {self._deadlines.free_s:g} s, "
                "all are in use; raise env.sessions, or let fewer episodes wait"
            ) from None
        self._free -= 1

    def _give_place_back(self) -> None:
        self._free += 1
        self._places.release()

    async def _exchange(self, session: LeasedSession, since: float, refusal: CapacityError) -> None:
        """Put another session into the place of one that was refused after it was opened."""
        refused = session.address, session.client
        session.address, session.client = await self._pool.obtain(since=since, last=refusal)
        self._discarded += 1
        self._pool.end(*refused)

    def _return(self, session: LeasedSession, *, sound: bool) -> None:
        if sound:
            self._pool.keep(session.address, session.client)
            self._give_place_back()
            return
        self._discarded += 1
        self._closing += 1
        self._pool.end(session.address, session.client).add_done_callback(self._place_closed)

    def _place_closed(self, _: "asyncio.Task[None]") -> None:
        self._closing -= 1
        self._give_place_back()
