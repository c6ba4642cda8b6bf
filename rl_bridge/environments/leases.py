"""Sessions on one or several environment servers: opened, kept, and lent to one episode at a time."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

from openenv_core import EnvClient, StepResult
from openenv_core.errors import (
    AccessRefusedError,
    AuthenticationError,
    CapacityError,
    ClientError,
    ConnectionFailedError,
    ConnectionLostError,
    RequestTimeoutError,
    ValidationFailedError,
)
from rl_bridge.config import Config
from rl_bridge.errors import RolloutError, SessionUnavailableError
from rl_bridge.metrics.spans import span


@dataclass(kw_only=True, slots=True, frozen=True)
class SessionDeadlines:
    """Every wait for an environment, in seconds.

    Attributes:
        free_s: Until a session is free: one of those that the worker may have, and again one of those that the servers
            have room for.
        connect_s: Until a session is open, all attempts and pauses together, where no server can be reached.
        reset_s: Until an episode has begun.
        step_s: Until a step has been taken.
    """

    free_s: float = 600.0
    connect_s: float = 60.0
    reset_s: float = 60.0
    step_s: float = 30.0

    @classmethod
    def of(cls, config: Config) -> Self:
        """As the configuration of a run on one environment says."""
        env = config.environment
        return cls(
            free_s=config.rollout.timeout_s,
            connect_s=env.connect_timeout_s,
            reset_s=env.reset_timeout_s,
            step_s=env.message_timeout_s,
        )


Client: TypeAlias = EnvClient[Any, Any, Any]
T = TypeVar("T")

BACKOFF_S = 0.1
"""After the first failure; doubles with each further one."""
MAX_BACKOFF_S = 5.0
FULL_SERVER_BACKOFF_S = 1.0
"""Between two attempts at a server that has no room, where it does not say how long."""


class ServerRecord:
    """What is known of one server. All times are those of the event loop's clock, in seconds.

    A server that cannot be reached is asked again after a pause that grows, by one session alone. A server without
    room is asked for a few sessions more after a while.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.idle: list[tuple[float, Client]] = []
        """Open sessions that nobody uses, and since when; the one that was used last is the last."""
        self.held = 0
        """Sessions that are in use, or being opened or closed."""
        self.opening = 0
        """Those of them that are being opened."""
        self.gone = False
        """Whether it was taken off the list: it gets no further session, and those that end are not kept."""
        self._failures = 0
        self._retry_at = 0.0
        self._room: int | None = None
        self._ask_at = 0.0

    def usable(self, now: float) -> bool:
        """Whether a session can be had here, or may be worth asking for."""
        if self._failures and (now < self._retry_at or self.opening):
            return False
        if self.idle or self._room is None or self.held < self._room:
            return True
        return now >= self._ask_at

    def usable_at(self) -> float | None:
        """When to look again at a server that is not usable; None where something else has to happen first."""
        if self._failures:
            return None if self.opening else self._retry_at
        return self._ask_at

    @property
    def crowded(self) -> bool:
        """Whether it serves, but had no room for a session that was asked for."""
        return self._room is not None and not self._failures

    def asked(self, now: float) -> None:
        """A session is being opened."""
        self.held += 1
        self.opening += 1
        if self._room is not None and self.held > self._room:
            self._room, self._ask_at = self.held + self.held // 8, now + FULL_SERVER_BACKOFF_S

    def opened(self) -> None:
        """A session could be opened."""
        self._failures = 0

    def failed(self, now: float) -> None:
        """It could not be reached, or a session broke."""
        if now < self._retry_at:
            return  # the sessions of a server that dies fail together: one failure, not one each
        pause = min(BACKOFF_S * 2**self._failures, MAX_BACKOFF_S)
        self._failures += 1
        self._retry_at = now + pause * random.uniform(0.5, 1.0)

    def refused(self, now: float, retry_after_s: float | None) -> None:
        """It has no room for a session that was asked for, which counts as held."""
        self._room = self.held - 1 + len(self.idle)
        self._ask_at = now + (
            FULL_SERVER_BACKOFF_S if retry_after_s is None else min(retry_after_s, MAX_BACKOFF_S)
        )

    def renewed(self) -> None:
        """Somebody says that it serves: what was known of it is out of date."""
        self._failures, self._retry_at, self._room = 0, 0.0, None


Learn: TypeAlias = Callable[[ServerRecord, BaseException], None]
Renew: TypeAlias = Callable[["LeasedSession", float, CapacityError], Awaitable[None]]


class LeasedSession:
    """Resets and steps of one session, each within its deadline. `SessionLeases.lease` makes it.

    Args:
        address: The server.
        client: Connected to it.
        deadlines: Of a reset and of a step.
        learn: Told of failures, which say something of the server.
        renew: Puts another session in the place of one that was refused, when there is room.
    """

    def __init__(
        self,
        address: ServerRecord,
        client: Client,
        *,
        deadlines: SessionDeadlines,
        learn: Learn,
        renew: Renew,
    ) -> None:
        self.address = address
        self.client = client
        self.broken = False
        """Whether a request failed. Nobody can say how its episode stands; the session is not used again.

        One that was refused has changed nothing.
        """
        self.forks: list[LeasedSession] = []
        """Made of this one by `SessionLeases.fork`; they end with its lease."""
        self._deadlines = deadlines
        self._learn = learn
        self._renew = renew

    @property
    def url(self) -> str:
        """Where its server is."""
        return self.address.url

    async def reset(self, **options: Any) -> StepResult[Any]:
        """Begin an episode.

        A server that takes a session in and then has no room for it is a refusal like any other: the session
        moves to where there is room.

        Args:
            options: `seed` and whatever else the environment takes.

        Raises:
            openenv_core.ClientError: As `EnvClient.reset`; `RequestTimeoutError` after the deadline.
            rl_bridge.errors.SessionUnavailableError: No server had room in time.
        """
        began = asyncio.get_running_loop().time()
        while True:
            try:
                return await self._within(
                    self._deadlines.reset_s, "reset", "env.reset_timeout_s", self.client.reset(**options)
                )
            except CapacityError as refusal:
                await self._renew(self, began, refusal)

    async def step(self, action: Any) -> StepResult[Any]:
        """Take a step.

        Raises:
            openenv_core.ClientError: As `EnvClient.step`; `RequestTimeoutError` after the deadline.
        """
        return await self._within(
            self._deadlines.step_s, "step", "env.message_timeout_s", self.client.step(action)
        )

    async def fork(self, count: int) -> list[Client]:
        """Return clients of sessions that begin where this one stands; see `SessionLeases.fork`.

        Raises:
            openenv_core.ClientError: As `EnvClient.fork`; `RequestTimeoutError` after the deadline.
        """
        return await self._within(
            self._deadlines.reset_s, "fork", "env.reset_timeout_s", self.client.fork(count)
        )

    async def _within(self, seconds: float, what: str, key: str, request: Awaitable[T]) -> T:
        sound = False
        try:
            async with asyncio.timeout(seconds) as timeout:
                result = await request
            sound = True
            return result
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise RequestTimeoutError(
                f"expected a {what} of {self.url} within {seconds:g} s, it is not done; "
                f"raise {key}, or see what the environment waits for"
            ) from error
        except ValidationFailedError:
            sound = True
            raise
        except ClientError as error:
            self._learn(self.address, error)
            raise
        finally:
            self.broken = not sound


logger = logging.getLogger(__name__)

Connect: TypeAlias = Callable[[str], Client]
"""Makes a client of the server at a URL, not connected yet. Its own deadline for replies should not be the
shorter one: `SessionDeadlines` has them."""

IDLE_SESSION_TTL_S = 30.0
"""How long a session stays open that nobody uses. Other workers may wait for room on its server."""
CLOSE_TIMEOUT_S = 5.0
"""How long a session that ends may hold its place. What is still open then is broken off."""


class SessionPool:
    """Opens sessions, keeps those that nobody uses, and closes them.

    Args:
        connect: Makes a client.
        limit: Sessions at most. Whoever asks for one sees to it that no more are in use; idle ones make way.
        deadlines: Of the wait for a session.
    """

    def __init__(self, connect: Connect, *, limit: int, deadlines: SessionDeadlines) -> None:
        self._connect = connect
        self._limit = limit
        self._deadlines = deadlines
        self._addresses: dict[str, ServerRecord] = {}
        self._held = 0
        self._ends: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._told_of_refusal = False
        self.opened = 0
        """Sessions opened, since the beginning."""
        self.failed = 0
        """Attempts to open one that failed, since the beginning."""

    @property
    def idle(self) -> int:
        """Open sessions that nobody uses."""
        return sum(len(address.idle) for address in self._addresses.values())

    def replace(self, urls: Sequence[str]) -> None:
        """Take another list of servers; see `SessionLeases.replace`."""
        for url in [url for url in self._addresses if url not in urls]:
            address = self._addresses.pop(url)
            address.gone = True
            self._close_idle(address)
        for url in urls:
            self._addresses.setdefault(url, ServerRecord(url)).renewed()
        self._wake()

    async def obtain(
        self, *, since: float | None = None, last: ClientError | None = None
    ) -> tuple[ServerRecord, Client]:
        """Return a session, an idle one or a fresh one. It is held until it is given to `keep` or `end`.

        Args:
            since: When the wait began, where this is not the first attempt.
            last: What came of the attempt before.

        Raises:
            SessionUnavailableError: None was to be had within the deadlines.
            openenv_core.ClientError: A server refuses sessions for a reason that will not pass.
            RolloutError: The pool is closed.
        """
        clock = asyncio.get_running_loop().time
        began = clock() if since is None else since
        latest = began + self._deadlines.free_s
        while True:
            try:
                async with asyncio.timeout_at(min(clock() + self._deadlines.connect_s, latest)) as timeout:
                    while True:
                        if self._closed:
                            raise RolloutError("expected open sessions, got some that were closed")
                        address = self._choose()
                        if address is None:
                            await self._pause()
                            if self._crowded:
                                timeout.reschedule(min(clock() + self._deadlines.connect_s, latest))
                        elif address.idle:
                            self.hold(address)
                            return address, address.idle.pop()[1]
                        else:
                            try:
                                return address, await self._open(address)
                            except (CapacityError, ConnectionFailedError, ConnectionLostError) as error:
                                if isinstance(error, AuthenticationError | AccessRefusedError):
                                    raise
                                last = error
            except TimeoutError:
                if not timeout.expired():
                    raise
                if self._crowded and clock() < latest:
                    continue  # the time went by in a pause, or while this process stood still
                servers = ", ".join(self._addresses) or "no server"
                raise SessionUnavailableError(
                    f"expected a session on {servers} within {clock() - began:.3g} s, got none: "
                    f"{last or 'none of them serves'}; see whether the environment's servers run, or raise "
                    "env.connect_timeout_s"
                ) from last

    def keep(self, address: ServerRecord, client: Client) -> None:
        """Take back a session that is in order. One that nobody shall use any more is closed."""
        if address.gone or self._closed:
            self.end(address, client)
        else:
            loop = asyncio.get_running_loop()
            address.idle.append((loop.time(), client))
            if self._sweep is None:
                self._sweep = loop.call_later(IDLE_SESSION_TTL_S, self._close_unused)
            self._release(address)

    def end(self, address: ServerRecord, client: Client) -> "asyncio.Task[None]":
        """Close a session that is held, without waiting for it. It is held until it is closed."""

        def ended(task: "asyncio.Task[None]") -> None:
            self._ends.discard(task)
            self._release(address)

        task = asyncio.create_task(shut(client))
        self._ends.add(task)
        task.add_done_callback(ended)
        return task

    def learn(self, address: ServerRecord, error: BaseException) -> None:
        """Draw from a failure what it says of the server."""
        now = asyncio.get_running_loop().time()
        if isinstance(error, CapacityError):
            address.refused(now, error.retry_after_s)
            self._tell_of_refusal(address, error)
        elif isinstance(error, ConnectionFailedError | ConnectionLostError):
            address.failed(now)
            # They have most likely broken too, and would each cost an episode an attempt.
            self._close_idle(address)

    async def close(self) -> None:
        """Close every idle session, and wait for those that are being closed."""
        self._closed = True
        for address in self._addresses.values():
            self._close_idle(address)
        if self._sweep is not None:
            self._sweep.cancel()
        self._wake()
        await asyncio.gather(*self._ends)

    def _choose(self) -> ServerRecord | None:
        now = asyncio.get_running_loop().time()
        usable = [address for address in self._addresses.values() if address.usable(now)]
        return min(usable, key=lambda address: address.held, default=None)

    @property
    def _crowded(self) -> bool:
        """Whether what is waited for is the end of an episode, of ours or of others, not a server."""
        return any(known.crowded for known in self._addresses.values())

    async def _pause(self) -> None:
        """Wait until something has changed, or a server may be asked again."""
        now = asyncio.get_running_loop().time()
        times = [at for address in self._addresses.values() if (at := address.usable_at()) is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(min(times) - now, 0.0) if times else None):
                await self._changed.wait()

    async def _open(self, address: ServerRecord) -> Client:
        client = self._connect(address.url)
        self._held += 1
        address.asked(asyncio.get_running_loop().time())
        self._make_room()
        try:
            await client.connect()
        except BaseException as error:
            self.failed += 1
            self.learn(address, error)
            self.end(address, client)
            raise
        finally:
            address.opening -= 1
            self._wake()
        address.opened()
        self.opened += 1
        return client

    def _tell_of_refusal(self, address: ServerRecord, refusal: CapacityError) -> None:
        if not self._told_of_refusal:
            self._told_of_refusal = True
            logger.warning(
                "%s admits fewer than the %d sessions of env.sessions, the others play: %s",
                address.url,
                self._limit,
                refusal,
            )

    def _make_room(self) -> None:
        """Close an idle session where a new one makes one too many."""
        if self.idle and self._held + self.idle > self._limit:
            fullest = max(self._addresses.values(), key=lambda address: len(address.idle))
            self.hold(fullest)
            self.end(fullest, fullest.idle.pop(0)[1])

    def _close_idle(self, address: ServerRecord) -> None:
        while address.idle:
            self.hold(address)
            self.end(address, address.idle.pop()[1])

    def _close_unused(self) -> None:
        """Close the sessions that nobody has used for long, and come back when the next has become one of them."""
        loop = asyncio.get_running_loop()
        for address in self._addresses.values():
            while address.idle and address.idle[0][0] + IDLE_SESSION_TTL_S <= loop.time():
                self.hold(address)
                self.end(address, address.idle.pop(0)[1])
        oldest = min(
            (address.idle[0][0] for address in self._addresses.values() if address.idle), default=None
        )
        self._sweep = (
            None if oldest is None else loop.call_at(oldest + IDLE_SESSION_TTL_S, self._close_unused)
        )

    def hold(self, address: ServerRecord) -> None:
        """Count a session of a server as in use, until it is given to `keep` or `end`."""
        self._held += 1
        address.held += 1

    def _release(self, address: ServerRecord) -> None:
        self._held -= 1
        address.held -= 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def shut(client: Client) -> None:
    """Close a session, in order where that is possible in time. Nobody is interested in why it is not."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await client.close()


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
        self._taking = asyncio.Lock()
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

    def replace(self, urls: Sequence[str]) -> None:
        """Take another list of servers. Sessions in use on others are finished, and not kept after that.

        Must be called on the event loop where sessions are in use.

        Args:
            urls: The servers that serve now, also those known before; what failed there is forgotten.
        """
        self._pool.replace(urls)

    @asynccontextmanager
    async def lease(self, forks: int = 0) -> AsyncIterator[LeasedSession]:
        """Have a session to oneself for the length of the block.

        It is kept for the next one, unless a request failed or the block is left by an exception.

        Args:
            forks: How many more `fork` may make of it.

        Raises:
            SessionUnavailableError: None was to be had within the deadlines.
            openenv_core.AuthenticationError: The server wants a token, or another one; also `AccessRefusedError`.
            openenv_core.ClientError: The server refuses sessions for a reason that will not pass.
            RolloutError: The leases were closed.
        """
        with span("lease", waits_for="session"):
            await self._take_places(1 + forks)
            try:
                session = self._make_session(*await self._pool.obtain())
            except BaseException:
                self._give_places_back(1 + forks)
                raise
        self._leased.add(session)
        sound = False
        try:
            yield session
            sound = not session.broken
        finally:
            self._leased.discard(session)
            self._give_places_back(forks - len(session.forks))
            for fork in session.forks:
                self._leased.discard(fork)
                self._end(fork)
            self._return(session, sound=sound)

    async def fork(self, session: LeasedSession, count: int) -> list[LeasedSession]:
        """Make of a session others that begin where it stands, and end with its lease.

        Args:
            session: From `lease`, which was told of so many.
            count: How many.

        Raises:
            openenv_core.ClientError: The environment cannot be forked, or the session failed.
        """
        for client in await session.fork(count):
            self._pool.hold(session.address)
            session.forks.append(self._make_session(session.address, client))
        self._leased.update(session.forks)
        return session.forks

    def _make_session(self, address: ServerRecord, client: Client) -> LeasedSession:
        return LeasedSession(
            address, client, deadlines=self._deadlines, learn=self._pool.learn, renew=self.renew
        )

    async def close(self) -> None:
        """Close every session. Those in use break; who waits for one is told."""
        await asyncio.gather(self._pool.close(), *(shut(session.client) for session in self._leased))

    async def _take_places(self, count: int) -> None:
        taken = 0
        try:
            # In turn: two who wait for what the other one has would wait for ever.
            async with asyncio.timeout(self._deadlines.free_s) as timeout, self._taking:
                while taken < count:
                    await self._places.acquire()
                    taken += 1
                    self._free -= 1
        except BaseException as error:
            self._give_places_back(taken)
            if not (isinstance(error, TimeoutError) and timeout.expired()):
                raise
            raise SessionUnavailableError(
                f"expected {count} of {self._sessions} sessions to be free within {self._deadlines.free_s:g} s, "
                "too many are in use; raise env.sessions, or let fewer episodes wait"
            ) from None

    def _give_places_back(self, count: int = 1) -> None:
        for _ in range(count):
            self._free += 1
            self._places.release()

    async def renew(
        self, session: LeasedSession, since: float | None = None, refusal: CapacityError | None = None
    ) -> None:
        """Put another session into the place of one that failed, or was refused after it was opened.

        Args:
            session: Which is leased.
            since: When the wait for it began, where that was not now.
            refusal: Why it could not be had.

        Raises:
            SessionUnavailableError: As `lease`; so are others.
        """
        given_up = session.address, session.client
        session.address, session.client = await self._pool.obtain(since=since, last=refusal)
        session.broken = False
        self._discarded += 1
        self._pool.end(*given_up)

    def _return(self, session: LeasedSession, *, sound: bool) -> None:
        if sound:
            self._pool.keep(session.address, session.client)
            self._give_places_back()
            return
        self._discarded += 1
        self._end(session)

    def _end(self, session: LeasedSession) -> None:
        self._closing += 1
        self._pool.end(session.address, session.client).add_done_callback(self._place_closed)

    def _place_closed(self, _: "asyncio.Task[None]") -> None:
        self._closing -= 1
        self._give_places_back()
