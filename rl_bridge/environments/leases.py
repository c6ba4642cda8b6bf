"""Leases of sessions on environment servers: sessions are opened, reused, and leased to one episode at a time."""

import asyncio
import contextlib
import heapq
import itertools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

from openenv_core import EnvClient, StepResult
from openenv_core.backoff import exponential_pause_s
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
    """Deadlines of all waits for an environment, in seconds.

    Attributes:
        free_s: For a free session, one of the worker's places and then room on a server, while no episode of the worker
            makes progress.
        connect_s: For opening a session while no server can be reached, all attempts and pauses together.
        reset_s: For a reset.
        step_s: For a step.
    """

    free_s: float = 600.0
    connect_s: float = 60.0
    reset_s: float = 60.0
    step_s: float = 30.0

    @classmethod
    def of(cls, config: Config) -> Self:
        """Read the deadlines from the configuration of a run on one environment."""
        env = config.environment
        return cls(
            free_s=config.call_timeout_s,
            connect_s=env.connect_timeout_s,
            reset_s=env.reset_timeout_s,
            step_s=env.message_timeout_s,
        )


Client: TypeAlias = EnvClient[Any, Any, Any]
T = TypeVar("T")

BACKOFF_S = 0.1
"""The pause after the first failure; doubles with each further one."""
MAX_BACKOFF_S = 5.0
FULL_SERVER_BACKOFF_S = 1.0
"""The pause between two attempts at a full server that does not say when to retry."""


class ServerRecord:
    """The state of one server. All times are the event loop's, in seconds.

    An unreachable server is retried after a growing pause, by one session alone. A full server is asked for a few more
    sessions after a while.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.idle: list[tuple[float, Client]] = []
        """Open, unused sessions and the time since which each is unused; the most recently used is last."""
        self.held = 0
        """The number of sessions in use or being opened or closed."""
        self.opening = 0
        """The number of sessions being opened."""
        self.removed = False
        """Whether it was removed from the list: it gets no new sessions, and sessions whose lease ends are closed."""
        self._failures = 0
        self._retry_at = 0.0
        self._capacity: int | None = None
        self._retry_full_at = 0.0

    def is_usable(self, now: float) -> bool:
        """Whether a session is available here or may be requested."""
        if self._failures and (now < self._retry_at or self.opening):
            return False
        return self._has_room or now >= self._retry_full_at

    def usable_at(self) -> float | None:
        """When an unusable server may become usable; None while another session is trying to reach it."""
        if self._failures and self.opening:
            return None
        retry_at = self._retry_at if self._failures else 0.0
        return retry_at if self._has_room else max(retry_at, self._retry_full_at)

    @property
    def _has_room(self) -> bool:
        """Whether a session is unused, or another one is not known to be refused."""
        return bool(self.idle) or self._capacity is None or self.held < self._capacity

    @property
    def is_full(self) -> bool:
        """Whether it is reachable but refused a session for lack of room."""
        return self._capacity is not None and not self._failures

    def begin_opening(self, now: float) -> None:
        """Record that a session is being opened."""
        self.held += 1
        self.opening += 1
        if self._capacity is not None and self.held > self._capacity:
            self._capacity, self._retry_full_at = self.held + self.held // 8, now + FULL_SERVER_BACKOFF_S

    def opened(self) -> None:
        """Record that a session was opened."""
        self._failures = 0

    def failed(self, now: float) -> None:
        """Record that it could not be reached or that a session broke."""
        if now < self._retry_at:
            return  # when a server dies all its sessions fail: count one failure, not one each
        self._failures += 1
        backoff_s = exponential_pause_s(self._failures, BACKOFF_S, MAX_BACKOFF_S)
        self._retry_at = now + backoff_s * random.uniform(0.5, 1.0)

    def refused(self, now: float, retry_after_s: float | None) -> None:
        """Record that it refused a session for lack of room; the session is still counted in `held`."""
        self._failures = 0
        self._capacity = self.held - 1 + len(self.idle)
        self._retry_full_at = now + (
            FULL_SERVER_BACKOFF_S if retry_after_s is None else min(retry_after_s, MAX_BACKOFF_S)
        )

    def reset_failures(self) -> None:
        """Clear the failures and the known room of a server that is reported to serve."""
        self._failures, self._retry_at, self._capacity = 0, 0.0, None


class LeasedSession:
    """A leased session whose resets and steps each have a deadline; made by `SessionLeases.lease`."""

    def __init__(self, leases: "SessionLeases", server: ServerRecord, client: Client) -> None:
        self._leases = leases
        self.server = server
        self.client = client
        self.broken = False
        """Whether a request failed, which leaves the episode's state unknown; the session is not reused.

        A request that failed validation changed nothing and does not count.
        """
        self.closing: asyncio.Task[None] | None = None
        """The end of the client, begun while another one is waited for to take its place."""

    @property
    def url(self) -> str:
        """Its server's URL."""
        return self.server.url

    async def reset(self, **options: Any) -> StepResult[Any]:
        """Begin an episode; `options` are `seed` and whatever else the environment takes.

        If the server accepted the session but now has no room for it, the session moves to a server with room.

        Raises:
            openenv_core.ClientError: As `EnvClient.reset`; `RequestTimeoutError` after the deadline.
            rl_bridge.errors.SessionUnavailableError: No server had room before the deadline.
        """
        began = asyncio.get_running_loop().time()
        while True:
            try:
                return await self._run_with_deadline(
                    self._leases.deadlines.reset_s,
                    "reset",
                    "env.reset_timeout_s",
                    self.client.reset(**options),
                )
            except CapacityError as refusal:
                await self._leases.renew(self, began, refusal)

    async def step(self, action: Any) -> StepResult[Any]:
        """Take a step; raises as `EnvClient.step` does, `RequestTimeoutError` after the deadline."""
        return await self._run_step(self.client.step(action))

    async def step_seats(self, actions: Mapping[str, Any]) -> StepResult[Any]:
        """Act for seats of the session; raises as `step`."""
        return await self._run_step(self.client.step_seats(actions))

    async def _run_step(self, request: Awaitable[T]) -> T:
        return await self._run_with_deadline(
            self._leases.deadlines.step_s, "step", "env.message_timeout_s", request
        )

    async def _run_with_deadline(self, seconds: float, operation: str, key: str, request: Awaitable[T]) -> T:
        is_reusable = False
        try:
            async with asyncio.timeout(seconds) as timeout:
                result = await request
            is_reusable = True
            return result
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise RequestTimeoutError(
                f"expected a {operation} of {self.url} within {seconds:g} s, it is not done; "
                f"raise {key}, or see what the environment is waiting for"
            ) from error
        except ValidationFailedError:
            is_reusable = True
            raise
        except ClientError as error:
            self._leases.record_failure(self.server, error)
            raise
        finally:
            self.broken = not is_reusable


logger = logging.getLogger(__name__)

Connect: TypeAlias = Callable[[str], Client]
"""Makes a client, not connected yet, of the server at a URL. Its reply timeout should be longer than the deadlines in
`SessionDeadlines`."""

IDLE_SESSION_TTL_S = 30.0
"""How long an unused session stays open; other workers may be waiting for room on its server."""
CLOSE_TIMEOUT_S = 5.0
"""How long closing a session may take; after that it is aborted, and its place is free."""


class SessionLeases:
    """Leases a bounded number of sessions over a list of servers that may change at any time.

    A session is opened when it is needed, on the server where this worker has the fewest in use, and kept for the
    next episode. A session whose request failed is closed, and the next episode gets a fresh one. An unreachable server
    is retried after a growing pause; while no session is available at all, callers wait for one until the deadline.

    Callers wait for their places in an order that they state, and each gets all of them at once. So none of them holds
    a part of what another one needs, and none is overtaken for ever.

    An instance is bound to the event loop on which it is used.

    Args:
        connect: Makes a client.
        sessions: The greatest number of sessions, over all servers; idle ones are closed to make room for others.
        deadlines: The deadlines of all waits.
        urls: The servers; may be empty if `replace` sets them later.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        sessions: int,
        deadlines: SessionDeadlines | None = None,
        urls: Sequence[str] = (),
    ) -> None:
        self.deadlines = deadlines or SessionDeadlines()
        self.sessions = sessions
        self.slots_taken = 0
        """Places held by an episode, or by a session that is being closed."""
        self.closing = 0
        """Places held by a session that is being closed."""
        self.opened = 0
        """The number of sessions opened so far."""
        self.failed = 0
        """The number of failed attempts to open a session so far."""
        self.discarded = 0
        """The number of sessions discarded after a failure so far."""
        self._connect = connect
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap of the callers that wait for places: order, running number, number of places, what wakes them."""
        self._tickets = itertools.count()
        self._progressed_at = 0.0
        self._leased: set[LeasedSession] = set()
        self._servers: dict[str, ServerRecord] = {}
        self._held = 0
        self._close_tasks: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._refusal_logged = False
        self.replace(urls)

    @property
    def leased(self) -> int:
        """Sessions that episodes hold or wait for a server to open."""
        return self.slots_taken - self.closing

    @property
    def idle(self) -> int:
        """The number of open, unused sessions."""
        return sum(len(server.idle) for server in self._servers.values())

    def replace(self, urls: Sequence[str]) -> None:
        """Replace the list of servers. Sessions in use on removed servers stay until their lease ends, then close.

        Must be called on the event loop on which sessions are used. Clears the failures of all listed servers.
        """
        for url in [url for url in self._servers if url not in urls]:
            server = self._servers.pop(url)
            server.removed = True
            self._close_idle(server)
        for url in urls:
            self._servers.setdefault(url, ServerRecord(url)).reset_failures()
        self._notify()

    @asynccontextmanager
    async def lease(self, *, order: int = 0) -> AsyncIterator[LeasedSession]:
        """Lease a session for the length of the block.

        Afterwards it is kept for the next lease, unless a request failed or the block raised.

        Args:
            order: Callers of a lower one get sessions first; among equals, whoever came first.

        Raises:
            SessionUnavailableError: No session was available before the deadlines.
            openenv_core.AuthenticationError: The server requires a token, or another one; also `AccessRefusedError`.
            openenv_core.ClientError: The server refuses sessions for a permanent reason.
            RolloutError: The leases were closed.
        """
        with span("lease", waits_for="session"):
            await self._acquire_slot(order)
            try:
                session = LeasedSession(self, *await self._get_session())
            except BaseException:
                self._release_slot()
                raise
        self._leased.add(session)
        is_reusable = False
        try:
            yield session
            is_reusable = not session.broken
        finally:
            self._leased.discard(session)
            if is_reusable:
                self._keep_idle(session.server, session.client)
                self._release_slot()
            else:
                self.discarded += 1
                self._end_session(session)

    def record_progress(self) -> None:
        """Record that an episode has made progress: whoever waits for a session has reason to go on waiting."""
        self._progressed_at = asyncio.get_running_loop().time()

    async def renew(
        self, session: LeasedSession, since: float | None = None, refusal: CapacityError | None = None
    ) -> None:
        """Replace a leased session that failed, or that its server refused after opening it.

        `since` is when the wait began, now by default. Raises as `lease` does.
        """
        # The old one is closed first: it may hold the room on its server that the new one needs.
        session.closing = session.closing or self._start_closing(session.server, session.client)
        await asyncio.wait({session.closing})
        session.server, session.client = await self._get_session(since=since, last_error=refusal)
        session.closing, session.broken = None, False
        self.discarded += 1

    def record_failure(self, server: ServerRecord, error: BaseException) -> None:
        """Update a server's state after a failure."""
        now = asyncio.get_running_loop().time()
        if isinstance(error, CapacityError):
            server.refused(now, error.retry_after_s)
            if not self._refusal_logged:
                self._refusal_logged = True
                logger.warning(
                    "%s admits fewer than the %d sessions of env.sessions; those admitted go on playing: %s",
                    server.url,
                    self.sessions,
                    error,
                )
        elif isinstance(error, ConnectionFailedError | ConnectionLostError):
            server.failed(now)
            # The idle sessions have most likely broken too, and would each cost an episode an attempt.
            self._close_idle(server)

    async def close(self) -> None:
        """Close every session, those in use included; waiters get an error."""
        self._closed = True
        for server in self._servers.values():
            self._close_idle(server)
        if self._sweep is not None:
            self._sweep.cancel()
        self._notify()
        await asyncio.gather(*self._close_tasks, *(_close(session.client) for session in self._leased))

    async def _acquire_slot(self, order: int) -> None:
        loop = asyncio.get_running_loop()
        began, granted = loop.time(), loop.create_future()
        heapq.heappush(self._waiters, (order, next(self._tickets), granted))
        self._grant_slots()
        try:
            while not granted.done():
                remaining_s = self._free_deadline(began) - loop.time()
                if remaining_s <= 0:
                    raise SessionUnavailableError(
                        f"expected one of {self.sessions} sessions to be free, all are in use, and no episode "
                        f"has made progress for {self.deadlines.free_s:g} s; see what they wait for, or raise "
                        "rollout.timeout_s"
                    )
                await asyncio.wait({granted}, timeout=remaining_s)
        except BaseException:
            if not granted.cancel():  # it has been granted meanwhile
                self._release_slot()
            else:
                self._grant_slots()
            raise

    def _grant_slots(self) -> None:
        """Wake the first waiters, as long as places are free."""
        while self._waiters:
            *_, granted = self._waiters[0]
            if not granted.done():
                if self.slots_taken == self.sessions:
                    return
                self.slots_taken += 1
                self.record_progress()
                granted.set_result(None)
            heapq.heappop(self._waiters)

    def _release_slot(self) -> None:
        self.slots_taken -= 1
        self._grant_slots()

    def _free_deadline(self, began: float) -> float:
        """Return until when a wait for a session lasts that began then, if no episode makes progress any more."""
        return max(began, self._progressed_at) + self.deadlines.free_s

    async def _get_session(
        self, *, since: float | None = None, last_error: ClientError | None = None
    ) -> tuple[ServerRecord, Client]:
        """Return an idle or a new session. It counts as held until it is passed to `_keep_idle` or `_start_closing`."""
        clock = asyncio.get_running_loop().time
        began = clock() if since is None else since
        while True:
            try:
                async with asyncio.timeout_at(
                    min(clock() + self.deadlines.connect_s, self._free_deadline(began))
                ) as timeout:
                    while True:
                        if self._closed:
                            raise RolloutError("the session leases are closed")
                        server = self._pick_server()
                        if server is None:
                            await self._wait_for_change()
                            if self._waits_for_room:
                                timeout.reschedule(
                                    min(clock() + self.deadlines.connect_s, self._free_deadline(began))
                                )
                        elif server.idle:
                            self._count_held(server)
                            return server, server.idle.pop()[1]
                        else:
                            try:
                                return server, await self._open(server)
                            except (CapacityError, ConnectionFailedError, ConnectionLostError) as error:
                                if isinstance(error, AuthenticationError | AccessRefusedError):
                                    raise
                                last_error = error
            except TimeoutError:
                if not timeout.expired():
                    raise
                is_waiting = self._waits_for_room and clock() < self._free_deadline(began)
                if server is not None:  # a session was being opened there
                    server.failed(clock())
                if is_waiting:
                    continue  # the time passed in a pause, or while this process was suspended
                servers = ", ".join(self._servers) or "no server"
                raise SessionUnavailableError(
                    f"expected a session on {servers} within {clock() - began:.3g} s, got none: "
                    f"{last_error or 'none of them serves'}; see whether the environment's servers run, or raise "
                    "env.connect_timeout_s"
                ) from last_error

    def _pick_server(self) -> ServerRecord | None:
        now = asyncio.get_running_loop().time()
        usable_servers = [server for server in self._servers.values() if server.is_usable(now)]
        return min(usable_servers, key=lambda server: server.held, default=None)

    @property
    def _waits_for_room(self) -> bool:
        """Whether the wait is for room on a full server, that is for an episode to end, here or on another worker."""
        return any(server.is_full for server in self._servers.values())

    async def _wait_for_change(self) -> None:
        """Wait until a server's state changes or a server may be retried."""
        now = asyncio.get_running_loop().time()
        times = [at for server in self._servers.values() if (at := server.usable_at()) is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(min(times) - now, 0.0) if times else None):
                await self._changed.wait()

    async def _open(self, server: ServerRecord) -> Client:
        client = self._connect(server.url)
        self._held += 1
        server.begin_opening(asyncio.get_running_loop().time())
        if self.idle and self._held + self.idle > self.sessions:
            fullest = max(self._servers.values(), key=lambda record: len(record.idle))
            self._close_oldest(fullest)
        try:
            await client.connect()
        except BaseException as error:
            self.failed += 1
            self.record_failure(server, error)
            self._start_closing(server, client)
            raise
        finally:
            server.opening -= 1
            self._notify()
        server.opened()
        self.opened += 1
        return client

    def _keep_idle(self, server: ServerRecord, client: Client) -> None:
        """Keep a healthy session for reuse, or close it if its server was removed or the leases are closed."""
        if server.removed or self._closed:
            self._start_closing(server, client)
            return
        loop = asyncio.get_running_loop()
        server.idle.append((loop.time(), client))
        if self._sweep is None:
            self._sweep = loop.call_later(IDLE_SESSION_TTL_S, self._close_unused)
        self._release(server)

    def _end_session(self, session: LeasedSession) -> None:
        """Start closing a session; its place is free once it is closed."""

        def on_closed(_: "asyncio.Task[None]") -> None:
            self.closing -= 1
            self._release_slot()

        self.closing += 1
        closing = session.closing or self._start_closing(session.server, session.client)
        closing.add_done_callback(on_closed)

    def _start_closing(self, server: ServerRecord, client: Client) -> "asyncio.Task[None]":
        """Start closing a held session without waiting for it; it counts as held until it is closed."""

        def on_closed(task: "asyncio.Task[None]") -> None:
            self._close_tasks.discard(task)
            self._release(server)

        task = asyncio.create_task(_close(client))
        self._close_tasks.add(task)
        task.add_done_callback(on_closed)
        return task

    def _close_idle(self, server: ServerRecord) -> None:
        while server.idle:
            self._close_oldest(server)

    def _close_oldest(self, server: ServerRecord) -> None:
        self._count_held(server)
        self._start_closing(server, server.idle.pop(0)[1])

    def _close_unused(self) -> None:
        """Close the sessions that have been unused for too long, and schedule the next sweep."""
        loop = asyncio.get_running_loop()
        for server in self._servers.values():
            while server.idle and server.idle[0][0] + IDLE_SESSION_TTL_S <= loop.time():
                self._close_oldest(server)
        oldest = min((server.idle[0][0] for server in self._servers.values() if server.idle), default=None)
        self._sweep = (
            None if oldest is None else loop.call_at(oldest + IDLE_SESSION_TTL_S, self._close_unused)
        )

    def _count_held(self, server: ServerRecord) -> None:
        """Count a session of a server as held, until it is passed to `_keep_idle` or `_start_closing`."""
        self._held += 1
        server.held += 1

    def _release(self, server: ServerRecord) -> None:
        self._held -= 1
        server.held -= 1
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _close(client: Client) -> None:
    """Close a session, within the timeout; failures are ignored, for the session is not used again."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await client.close()
