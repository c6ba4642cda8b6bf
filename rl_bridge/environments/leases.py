"""Sessions on one or several environment servers, lent to one episode at a time."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from openenv_core.errors import (
    AccessRefused,
    AuthenticationFailed,
    CapacityReached,
    ClientError,
    ConnectionFailed,
    ConnectionLost,
)
from rl_bridge.environments.address import Address, Client
from rl_bridge.environments.deadlines import SessionDeadlines
from rl_bridge.environments.session import LeasedSession
from rl_bridge.errors import RolloutError, SessionUnavailable

logger = logging.getLogger(__name__)

Connect: TypeAlias = Callable[[str], Client]
"""Makes a client of the server at a URL, not connected yet. Its own deadline for replies should not be the
shorter one: `SessionDeadlines` has them."""

CLOSE_S = 5.0
"""How long a session that ends may hold its place. What is still open then is broken off."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LeaseCounts:
    """How the sessions of a worker stand; the first three together are always the bound.

    Attributes:
        free: Sessions that an episode could have.
        lent: Sessions that an episode has, or waits for a server to open.
        closing: Sessions that nobody may have yet.
        idle: Open sessions that nobody uses; each stands for a free one.
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

    Not bound to a thread, but to the event loop that it is used on.

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
        self._connect = connect
        self._sessions = sessions
        self._deadlines = deadlines or SessionDeadlines()
        self._places = asyncio.BoundedSemaphore(sessions)
        self._addresses: dict[str, Address] = {}
        self._leased: set[LeasedSession] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self._free, self._closing = sessions, 0
        self._opened = self._discarded = self._failed = 0
        self._changed = asyncio.Event()
        self._closed = False
        self._told_of_refusal = False
        self.replace(urls)

    @property
    def counts(self) -> LeaseCounts:
        """How the sessions stand."""
        return LeaseCounts(
            free=self._free,
            lent=self._sessions - self._free - self._closing,
            closing=self._closing,
            idle=sum(len(address.idle) for address in self._addresses.values()),
            opened=self._opened,
            discarded=self._discarded,
            failed=self._failed,
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers that sessions are opened on."""
        return tuple(self._addresses)

    def replace(self, urls: Sequence[str]) -> None:
        """Take another list of servers. Sessions in use on others are finished, and not kept after that.

        Must be called on the event loop where sessions are in use.

        Args:
            urls: The servers that serve now, also those known before; what failed there is forgotten.
        """
        for url in [url for url in self._addresses if url not in urls]:
            address = self._addresses.pop(url)
            address.gone = True
            self._close_idle(address)
        for url in urls:
            self._addresses.setdefault(url, Address(url)).renewed()
        self._wake()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[LeasedSession]:
        """Have a session to oneself for the length of the block.

        It is kept for the next one, unless a request failed or the block is left by an exception.

        Raises:
            SessionUnavailable: None was to be had within the deadlines.
            openenv_core.AuthenticationFailed: The server wants a token, or another one; also `AccessRefused`.
            openenv_core.ClientError: The server refuses sessions for a reason that will not pass.
            RolloutError: The leases were closed.
        """
        await self._take_place()
        try:
            session = LeasedSession(
                *await self._obtain(),
                deadlines=self._deadlines,
                learn=self._learn,
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
        self._closed = True
        for address in self._addresses.values():
            self._close_idle(address)
        self._wake()
        await asyncio.gather(*(_shut(session.client) for session in self._leased), *self._ends)

    async def _take_place(self) -> None:
        try:
            async with asyncio.timeout(self._deadlines.free_s) as timeout:
                await self._places.acquire()
        except TimeoutError:
            if not timeout.expired():
                raise
            raise SessionUnavailable(
                f"expected one of {self._sessions} sessions to be free within {self._deadlines.free_s:g} s, "
                "all are in use; raise env.sessions, or let fewer episodes wait"
            ) from None
        self._free -= 1

    def _give_place_back(self) -> None:
        self._free += 1
        self._places.release()

    async def _obtain(self) -> tuple[Address, Client]:
        """Return a session that counts as held, an idle one or a fresh one."""
        last: ClientError | None = None
        try:
            async with asyncio.timeout(self._deadlines.connect_s) as timeout:
                while True:
                    if self._closed:
                        raise RolloutError("expected open sessions, got leases that were closed")
                    address = self._choose()
                    if address is None:
                        await self._pause()
                    elif address.idle:
                        address.held += 1
                        return address, address.idle.pop()
                    else:
                        try:
                            return address, await self._open(address)
                        except (CapacityReached, ConnectionFailed, ConnectionLost) as error:
                            if isinstance(error, AuthenticationFailed | AccessRefused):
                                raise
                            last = error
        except TimeoutError:
            if not timeout.expired():
                raise
            servers = ", ".join(self._addresses) or "no server"
            raise SessionUnavailable(
                f"expected a session on {servers} within {self._deadlines.connect_s:g} s, got none: "
                f"{last or 'none of them serves'}; see whether the environment's servers run, or raise "
                "env.connect_timeout_s"
            ) from last

    def _choose(self) -> Address | None:
        now = asyncio.get_running_loop().time()
        usable = [address for address in self._addresses.values() if address.usable(now)]
        return min(usable, key=lambda address: address.held, default=None)

    async def _pause(self) -> None:
        """Wait until something has changed, or a server may be asked again."""
        now = asyncio.get_running_loop().time()
        times = [at for address in self._addresses.values() if (at := address.usable_at()) is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(min(times) - now, 0.0) if times else None):
                await self._changed.wait()

    async def _open(self, address: Address) -> Client:
        client = self._connect(address.url)
        address.held += 1
        address.opening += 1
        self._make_room()
        try:
            await client.connect()
        except BaseException as error:
            self._failed += 1
            self._learn(address, error)
            self._end(address, client)
            raise
        finally:
            address.opening -= 1
            self._wake()
        address.opened()
        self._opened += 1
        return client

    def _learn(self, address: Address, error: BaseException) -> None:
        """Draw from a failure what it says of the server."""
        now = asyncio.get_running_loop().time()
        if isinstance(error, CapacityReached):
            address.refused(now, error.retry_after_s)
            self._tell_of_refusal(address, error)
        elif isinstance(error, ConnectionFailed | ConnectionLost):
            address.failed(now)
            self._close_idle(
                address
            )  # they have most likely broken too, and would each cost an episode an attempt

    def _tell_of_refusal(self, address: Address, refusal: CapacityReached) -> None:
        if not self._told_of_refusal:
            self._told_of_refusal = True
            logger.warning(
                "%s admits fewer than the %d sessions of env.sessions, the others play: %s",
                address.url,
                self._sessions,
                refusal,
            )

    def _make_room(self) -> None:
        """Close an idle session elsewhere where a new one makes one too many."""
        known = self._addresses.values()
        if sum(len(address.idle) for address in known) > self._free:
            fullest = max(known, key=lambda address: len(address.idle))
            fullest.held += 1
            self._end(fullest, fullest.idle.pop(0))

    async def _exchange(self, session: LeasedSession) -> None:
        """Put another session into the place of one that was refused after it was opened."""
        address, client = session.address, session.client
        session.address, session.client = await self._obtain()
        self._discarded += 1
        self._end(address, client)

    def _return(self, session: LeasedSession, *, sound: bool) -> None:
        address = session.address
        if sound and not address.gone and not self._closed:
            address.held -= 1
            address.idle.append(session.client)
            self._give_place_back()
            self._wake()
            return
        if not sound:
            self._discarded += 1
        self._closing += 1
        self._end(address, session.client).add_done_callback(self._place_closed)

    def _place_closed(self, _: "asyncio.Task[None]") -> None:
        self._closing -= 1
        self._give_place_back()

    def _close_idle(self, address: Address) -> None:
        while address.idle:
            address.held += 1
            self._end(address, address.idle.pop())

    def _end(self, address: Address, client: Client) -> "asyncio.Task[None]":
        """Close a session that counts as held, without waiting for it."""

        def ended(task: "asyncio.Task[None]") -> None:
            self._ends.discard(task)
            address.held -= 1
            self._wake()

        task = asyncio.create_task(_shut(client))
        self._ends.add(task)
        task.add_done_callback(ended)
        return task

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _shut(client: Client) -> None:
    """Close a session, in order where that is possible in time. Nobody is interested in why it is not."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(CLOSE_S):
            await client.close()
