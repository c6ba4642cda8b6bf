"""Leased sessions on real servers: kept, replaced, timed out, moved to where there is room."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from serving import serving
from slow_server import SlowClient, Wait, make_app

from openenv_core import ExecutionError, RequestTimeoutError
from rl_bridge.environments import leases as leases_module
from rl_bridge.environments.leases import SessionDeadlines, SessionLeases
from rl_bridge.errors import RolloutError, SessionUnavailableError

HANG_S = 30.0
"""A bound for what would hang otherwise; none is meant to come near it."""


@pytest.fixture
async def wide() -> AsyncIterator[str]:
    async with serving(make_app(512)) as address:
        yield f"http://{address}"


@pytest.fixture
async def narrow() -> AsyncIterator[str]:
    """Has room for two sessions."""
    async with serving(make_app(2)) as address:
        yield f"http://{address}"


@asynccontextmanager
async def leases_on(*servers: str, sessions: int = 4, **deadlines: float) -> AsyncIterator[SessionLeases]:
    leases = SessionLeases(
        lambda url: SlowClient(url, message_timeout_s=None, queue_timeout_s=0.0),
        sessions=sessions,
        deadlines=SessionDeadlines(**deadlines),
        urls=servers,
    )
    try:
        yield leases
    finally:
        async with asyncio.timeout(HANG_S):
            await leases.close()
        assert (leases.slots_taken, leases.closing, leases.idle) == (0, 0, 0)


async def play(leases: SessionLeases, steps: int = 2) -> int:
    async with leases.lease() as session:
        await session.reset()
        for _ in range(steps):
            result = await session.step(Wait())
        return int(result.observation.steps)


async def test_working_session_is_kept_for_the_next_episode(wide: str) -> None:
    async with leases_on(wide) as leases:
        assert await asyncio.gather(*(play(leases) for _ in range(40))) == [2] * 40
        assert (leases.opened, leases.idle, leases.discarded) == (4, 4, 0)


@pytest.mark.parametrize(
    ("seconds", "error", "message"),
    [
        (-1.0, ExecutionError, "backwards"),
        (60.0, RequestTimeoutError, r"a step of http.* within 0\.5 s.*env\.message_timeout_s"),
        (60.0, asyncio.CancelledError, "^$"),
    ],
)
async def test_failed_session_is_not_used_again(
    wide: str, seconds: float, error: type[BaseException], message: str
) -> None:
    async with leases_on(wide, sessions=1) as leases:
        await play(leases)
        usual = leases.deadlines
        async with leases.lease() as session:
            client = session.client
            await session.reset()
            if error is RequestTimeoutError:
                leases.deadlines = SessionDeadlines(step_s=0.5)
            stepping = asyncio.ensure_future(session.step(Wait(seconds=seconds)))
            if error is asyncio.CancelledError:
                await asyncio.sleep(0.01)
                stepping.cancel()
            with pytest.raises(error, match=message):
                await stepping
        leases.deadlines = usual
        assert await play(leases) == 2
        assert (leases.opened, leases.discarded) == (2, 1)
        assert not client.connected


@pytest.mark.soak
async def test_idle_sessions_make_room_for_other_workers(
    narrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "FULL_SERVER_BACKOFF_S", 0.05)
    monkeypatch.setattr(leases_module, "IDLE_SESSION_TTL_S", 0.5)
    # A server without room can be reached: what bounds the wait is not how long that may take.
    async with (
        leases_on(narrow, sessions=2) as first,
        leases_on(narrow, connect_s=2.0, free_s=4.0) as hasty,
        leases_on(narrow, connect_s=2.0) as second,
    ):
        async with first.lease() as one, first.lease() as two:
            await asyncio.gather(one.reset(), two.reset())
            with pytest.raises(
                SessionUnavailableError, match=r"within ([4-9]|\d\d)[\d.]* s, got none: CAPACITY_REACHED"
            ):
                await play(hasty)
            waiting = asyncio.ensure_future(play(second))
        assert first.idle == 2
        async with asyncio.timeout(HANG_S):
            assert await waiting == 2
            while first.idle:  # noqa: ASYNC110 - it is about time
                await asyncio.sleep(0.01)
        assert (first.discarded, first.slots_taken) == (0, 0)
        assert await play(first) == 2


async def test_full_server_is_left_for_one_with_room(
    wide: str, narrow: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases_module, "FULL_SERVER_BACKOFF_S", 0.05)
    together = asyncio.Barrier(8)
    async with leases_on(narrow, wide, sessions=8) as leases, asyncio.timeout(HANG_S):

        async def find_server() -> str:
            async with leases.lease() as session:
                await session.reset()
                await together.wait()
                return session.url

        found = await asyncio.gather(*(find_server() for _ in range(8)))
        assert Counter(found) == {wide: 6, narrow: 2}
    caplog.clear()
    # Where there is none with room one waits for the end of others' episodes, and is told why, once.
    async with leases_on(narrow, sessions=8) as leases, asyncio.timeout(HANG_S):
        assert await asyncio.gather(*(play(leases) for _ in range(24))) == [2] * 24
    assert len([text for text in caplog.messages if "fewer than the 8 sessions of env.sessions" in text]) == 1


async def test_absent_server_is_asked_again_until_the_deadline(
    wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "BACKOFF_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with leases_on(dead, connect_s=1.5) as leases:
        with pytest.raises(SessionUnavailableError, match=r"got none: expected an OpenEnv server"):
            await play(leases)
        assert 1 < leases.failed < 10
    # It need not be the end: the list may change while one waits.
    async with leases_on(dead, connect_s=HANG_S) as leases:
        waiting = asyncio.ensure_future(play(leases))
        async with asyncio.timeout(HANG_S):
            while leases.failed == 0:  # noqa: ASYNC110 - it is about time
                await asyncio.sleep(0.01)
        leases.replace([dead, wide])
        assert await waiting == 2


async def test_closed_leases_lend_nothing_and_break_what_is_lent(wide: str) -> None:
    async with leases_on(wide, sessions=1) as leases:
        async with leases.lease() as session:
            await session.reset()
            waiting = asyncio.ensure_future(play(leases))
            stepping = asyncio.ensure_future(session.step(Wait(seconds=60)))
            await asyncio.sleep(0.05)
            await leases.close()
            outcome: Any = (await asyncio.gather(stepping, return_exceptions=True))[0]
            assert "broken off by this client" in str(outcome)
        with pytest.raises(RolloutError, match="session leases are closed"):
            await waiting
