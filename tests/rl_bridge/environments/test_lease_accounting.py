"""Every session that is taken is given back, whatever happens to it: servers are simulated that do all of it wrong."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import AsyncMock

import pytest

from benchmarks.simulated_time import simulated
from openenv_core.errors import (
    CapacityError,
    ConnectionFailedError,
    ConnectionLostError,
    ExecutionError,
    RequestTimeoutError,
)
from rl_bridge.environments import leases
from rl_bridge.environments.leases import ServerRecord, SessionDeadlines, SessionLeases
from rl_bridge.errors import SessionUnavailableError

SESSIONS = 6
EPISODES = 400
URLS = [f"http://server{number}" for number in range(4)]


class World:
    """Servers that come and go. Each has room for a few sessions, and says so early or late."""

    def __init__(self, seed: int = 0, *, calm: bool = True) -> None:
        self.random = random.Random(seed)
        self.up = dict.fromkeys(URLS, 0)
        """The life that each server is in; negative: it is dead."""
        self.room = dict(zip(URLS, (100, 3, 2, 1), strict=True))
        self.open: Counter[str] = Counter()
        self.made: list[Client] = []
        self.calm = calm
        """Whether requests are answered."""

    def client(self, url: str) -> Any:
        self.made.append(Client(self, url))
        return self.made[-1]

    def toggle(self) -> None:
        url = self.random.choice(URLS)
        self.up[url] = -self.up[url] - 1 if self.up[url] >= 0 else -self.up[url]


class Client:
    def __init__(self, world: World, url: str) -> None:
        self.world, self.url = world, url
        self.life: int | None = None
        self.entered = False
        self.closed = 0

    @property
    def late(self) -> bool:
        """Whether its server says only after it has let one in that it has no room."""
        return self.url in URLS[::2]

    async def connect(self) -> None:
        await self._linger()
        if self.world.up[self.url] < 0:
            raise ConnectionFailedError("nobody there")
        if not self.late:
            self._enter()
        self.life = self.world.up[self.url]

    def _enter(self) -> None:
        if self.world.open[self.url] >= self.world.room[self.url]:
            raise CapacityError("full", data={"retry_after_s": 0.001})
        self.world.open[self.url] += 1
        self.entered = True

    async def reset(self, **options: Any) -> str:
        await self._linger()
        self._require_life()
        if not self.entered:
            self._enter()
        return "reset"

    async def step(self, action: Any) -> str:
        await self._linger()
        self._require_life()
        if not self.world.calm and self.world.random.random() < 0.02:
            raise ExecutionError("the environment raised")
        return "step"

    async def close(self) -> None:
        self.closed += 1
        if self.entered:
            self.entered = False
            self.world.open[self.url] -= 1
        await self._linger()
        if self.world.random.random() < 0.1:
            raise ConnectionLostError("while it was closed")

    def _require_life(self) -> None:
        if self.life != self.world.up[self.url]:
            raise ConnectionLostError("it died")

    async def _linger(self) -> None:
        kind = self.world.random.random()
        if kind < 0.01 and not self.world.calm:
            await asyncio.sleep(3600)
        for _ in range(int(kind * 4)):
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 12))])
async def test_every_slot_and_session_is_returned(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BACKOFF_S", "FULL_SERVER_BACKOFF_S", "MAX_BACKOFF_S"):
        monkeypatch.setattr(leases, name, 0.002)
    monkeypatch.setattr(leases, "CLOSE_TIMEOUT_S", 0.01)
    world = World(seed, calm=False)
    deadlines = SessionDeadlines(free_s=20, connect_s=0.1, reset_s=0.01, step_s=0.01)
    held = SessionLeases(world.client, sessions=SESSIONS, deadlines=deadlines, urls=URLS[:2])
    inside = 0

    async def episode() -> None:
        nonlocal inside
        async with held.lease() as session:
            inside += 1
            try:
                assert inside <= SESSIONS
                await session.reset(seed=1)
                for _ in range(world.random.randrange(4)):
                    await session.step("act")
                if world.random.random() < 0.05:
                    raise ZeroDivisionError("a task that is wrong")
            finally:
                inside -= 1

    async def disturb() -> None:
        while True:
            await asyncio.sleep(0.001)
            world.toggle()
            held.replace(world.random.sample(URLS, world.random.randrange(5)))
            if tasks:
                world.random.choice(tasks).cancel()
            assert 0 <= held.closing <= held.slots_taken <= SESSIONS
            assert held.idle + inside <= SESSIONS  # who has a place may still wait for a server

    tasks: list[asyncio.Task[None]] = []
    disturbance = asyncio.create_task(disturb())
    async with asyncio.timeout(60):
        for _ in range(EPISODES):
            tasks.append(asyncio.create_task(episode()))
            await asyncio.sleep(0)
        ends = Counter(type(end) for end in await asyncio.gather(*tasks, return_exceptions=True))
    disturbance.cancel()
    with pytest.raises(asyncio.CancelledError):
        await disturbance

    # What is wrong with the world is over: as many episodes as ever are played at once.
    world.calm = True
    held.deadlines = SessionDeadlines(free_s=20, connect_s=20, reset_s=20, step_s=20)
    world.up = dict.fromkeys(URLS, 10_000)
    held.replace([])
    held.replace(URLS[:1])
    together = asyncio.Barrier(SESSIONS)

    async def meet() -> None:
        async with held.lease() as session:
            await session.reset()
            await together.wait()

    async with asyncio.timeout(60):
        await asyncio.gather(*(meet() for _ in range(SESSIONS)))
        await held.close()
    assert (held.slots_taken, held.closing, held.idle) == (0, 0, 0)
    # Every client that was ever made was closed, and no server holds a session.
    assert [client for client in world.made if not client.closed] == []
    assert world.open.total() == 0
    assert ends[type(None)] > 50  # played to their end
    assert {ConnectionLostError, RequestTimeoutError, ZeroDivisionError, asyncio.CancelledError} <= set(ends)


async def reset_once(held: SessionLeases) -> None:
    async with held.lease() as session:
        await session.reset()


async def test_wait_for_a_session_has_a_deadline_and_takes_no_slot() -> None:
    world = World()
    deadlines = SessionDeadlines(free_s=0.02, connect_s=0.05)
    held = SessionLeases(world.client, sessions=2, deadlines=deadlines)
    with pytest.raises(SessionUnavailableError, match=r"a session on no server within [\d.]+ s"):
        await held.lease().__aenter__()
    assert held.slots_taken == 0
    held.replace(URLS[:1])
    async with held.lease(), held.lease():
        with pytest.raises(SessionUnavailableError, match=r"one of 2 sessions to be free, .* for 0\.02 s"):
            await held.lease().__aenter__()
        assert held.slots_taken == 2
    assert held.slots_taken == 0
    await held.close()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 12))])
@simulated
async def test_episodes_get_their_places_in_order_of_age_and_give_them_back(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order in which episodes and waits end, and in which sessions are renewed."""
    monkeypatch.setattr(Client, "_linger", AsyncMock())  # so that whoever gets its places first goes on first
    chance = random.Random(seed)
    world = World(seed)
    held = SessionLeases(world.client, sessions=SESSIONS, urls=URLS[:1])
    waiting = set[int]()
    played = cancelled = 0

    async def episode(age: int) -> None:
        nonlocal played
        waiting.add(age)
        async with AsyncExitStack() as stack:
            try:
                session = await stack.enter_async_context(held.lease(order=age))
            finally:
                waiting.discard(age)
            assert age < min(waiting, default=60)
            assert held.slots_taken <= SESSIONS
            await asyncio.sleep(chance.lognormvariate(0.0, 1.0))
            if chance.random() < 0.2:
                await held.renew(session)
            if chance.random() < 0.1:
                raise ZeroDivisionError("a task that is wrong")
        played += 1

    async def run(age: int) -> None:
        nonlocal cancelled
        await asyncio.sleep(chance.uniform(0.0, 30.0))
        playing = asyncio.create_task(episode(age))
        if chance.random() < 0.3:
            await asyncio.sleep(chance.uniform(0.0, 3.0))
            cancelled += playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        if not playing.cancelled():
            assert not isinstance(playing.exception(), AssertionError), playing.exception()

    await asyncio.gather(*(run(age) for age in range(60)))
    await held.close()
    assert played > 20
    assert cancelled
    assert (held.slots_taken, held.closing, held.idle, world.open.total()) == (0, 0, 0, 0)


async def test_session_that_is_renewed_gives_up_its_room_first() -> None:
    world = World()
    world.room[URLS[1]] = 1
    deadlines = SessionDeadlines(free_s=0.5, connect_s=0.5)
    held = SessionLeases(world.client, sessions=1, deadlines=deadlines, urls=URLS[1:2])
    async with held.lease() as session:
        world.up[URLS[1]] += 1  # it is lost, but the server has not noticed
        with pytest.raises(ConnectionLostError):
            await session.reset()
        await held.renew(session)
        await session.reset()
    await held.close()
    assert held.slots_taken == 0


async def test_end_of_a_server_costs_one_attempt_however_many_sessions_were_idle() -> None:
    world = World()
    held = SessionLeases(world.client, sessions=SESSIONS, urls=URLS[:1])

    await asyncio.gather(*(reset_once(held) for _ in range(SESSIONS)))
    assert held.idle == SESSIONS
    world.up[URLS[0]] += 1  # another life of the same server
    with pytest.raises(ConnectionLostError):
        await reset_once(held)
    async with asyncio.timeout(60):
        await asyncio.gather(*(reset_once(held) for _ in range(SESSIONS)))
        await held.close()
    assert held.discarded == 1


async def test_server_that_lets_nobody_in_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "BACKOFF_S", leases.MAX_BACKOFF_S)
    world = World()
    silent: Any = Client(world, URLS[0])
    silent.connect = asyncio.Event().wait
    held = SessionLeases(
        lambda url: silent if url == URLS[0] else world.client(url),
        sessions=1,
        deadlines=SessionDeadlines(connect_s=0.02),
        urls=URLS[:2],
    )
    with pytest.raises(SessionUnavailableError):
        await reset_once(held)
    held.deadlines = SessionDeadlines()
    await asyncio.sleep(0.01)  # then nothing of it counts as held any more
    await reset_once(held)
    await held.close()


async def test_full_server_that_once_does_not_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had been suspended while it asked again."""
    monkeypatch.setattr(leases, "BACKOFF_S", 0.0)
    client: Any = Client(World(), URLS[0])
    attempts = iter(("full", "silent", "open"))

    async def connect() -> None:
        attempt = next(attempts)
        if attempt == "full":
            raise CapacityError("full", data={"retry_after_s": 0.0})
        if attempt == "silent":
            await asyncio.Event().wait()

    client.connect = connect
    held = SessionLeases(
        lambda url: client, sessions=1, deadlines=SessionDeadlines(connect_s=0.02), urls=URLS[:1]
    )
    async with held.lease():
        assert held.opened == 1
    await held.close()


def test_server_that_answers_again_that_it_is_full_is_waited_for() -> None:
    server = ServerRecord(URLS[0])
    server.failed(0.0)
    server.begin_opening(1.0)
    server.refused(1.0, 4.0)
    server.held = server.opening = 0
    assert (server.is_full, server.is_usable(2.0), server.usable_at()) == (True, False, 5.0)
    server.failed(1.0)  # a session broke; whoever waits would ask again and again before 5.0 otherwise
    assert (server.is_usable(2.0), server.usable_at()) == (False, 5.0)


def test_a_server_may_be_down_for_hours() -> None:
    server, now = ServerRecord(URLS[0]), 0.0
    for _ in range(2000):
        server.failed(now)
        waits_until = server.usable_at()
        assert waits_until is not None
        assert now < waits_until <= now + leases.MAX_BACKOFF_S
        now = waits_until
