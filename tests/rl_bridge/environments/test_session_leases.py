"""Leased sessions on real servers: kept, replaced, timed out, moved to where there is room."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from slow_server import SlowClient, Wait

from openenv_core import ExecutionFailed, LocalProcessProvider, RequestTimeout
from rl_bridge.environments import address, pool
from rl_bridge.environments.deadlines import SessionDeadlines
from rl_bridge.environments.leases import SessionLeases
from rl_bridge.environments.session import LeasedSession
from rl_bridge.errors import RolloutError, SessionUnavailable

HERE = str(Path(__file__).parent)
HANG_S = 30.0
"""A bound for what would hang otherwise; none is meant to come near it."""


APPS = {"wide": "slow_server:app", "narrow": "slow_server:narrow_app", "other": "slow_server:app"}
"""The narrow one has room for two sessions."""


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    providers = {name: LocalProcessProvider(app, cwd=HERE) for name, app in APPS.items()}
    with ThreadPoolExecutor() as threads:
        try:
            started = threads.map(LocalProcessProvider.start, providers.values())
            yield dict(zip(providers, started, strict=True))
        finally:
            list(threads.map(LocalProcessProvider.stop, providers.values()))


@asynccontextmanager
async def leases_on(*servers: str, sessions: int = 4, **deadlines: float) -> AsyncIterator[SessionLeases]:
    leases = SessionLeases(
        lambda url: SlowClient(url, message_timeout_s=None),
        sessions=sessions,
        deadlines=SessionDeadlines(**deadlines),
        urls=servers,
    )
    try:
        yield leases
    finally:
        async with asyncio.timeout(HANG_S):
            await leases.close()
        counts = leases.counts
        assert (counts.lent, counts.closing, counts.idle) == (0, 0, 0)


async def play(leases: SessionLeases, steps: int = 2) -> int:
    async with leases.lease() as session:
        await session.reset()
        for _ in range(steps):
            result = await session.step(Wait())
        return int(result.observation.steps)


async def test_a_session_in_order_is_kept_for_the_next_episode(urls: dict[str, str]) -> None:
    async with leases_on(urls["wide"]) as leases:
        assert await asyncio.gather(*(play(leases) for _ in range(40))) == [2] * 40
        assert (leases.counts.opened, leases.counts.idle, leases.counts.discarded) == (4, 4, 0)


async def test_256_episodes_are_in_flight_against_one_server(urls: dict[str, str]) -> None:
    together = asyncio.Barrier(256)

    async def meet(leases: SessionLeases) -> None:
        async with leases.lease() as session:
            await session.reset()
            await together.wait()
            await session.step(Wait())

    async with leases_on(urls["wide"], sessions=256) as leases, asyncio.timeout(HANG_S):
        await asyncio.gather(*(meet(leases) for _ in range(256)))
        assert (leases.counts.opened, leases.counts.failed, leases.counts.discarded) == (256, 0, 0)


@pytest.mark.parametrize("way", ["raises", "timed out", "swallowed", "cancelled", "the episode's own fault"])
async def test_a_session_that_failed_is_not_used_again(urls: dict[str, str], way: str) -> None:
    async with leases_on(urls["wide"], sessions=1, step_s=1.0 if way == "timed out" else HANG_S) as leases:
        await play(leases)

        async def fail(session: LeasedSession) -> None:
            await session.reset()
            if way == "timed out":
                with pytest.raises(
                    RequestTimeout, match=r"a step of http.* within 1 s.*env\.message_timeout_s"
                ):
                    await session.step(Wait(seconds=60))
            elif way == "swallowed":
                with pytest.raises(ExecutionFailed):
                    await session.step(Wait(seconds=-1))
            elif way == "cancelled":
                task = asyncio.ensure_future(session.step(Wait(seconds=60)))
                await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif way == "raises":
                await session.step(Wait(seconds=-1))
            else:
                raise ZeroDivisionError

        try:
            async with leases.lease() as session:
                client = session.client
                await fail(session)
        except (ExecutionFailed, ZeroDivisionError):
            assert way in ("raises", "the episode's own fault")
        assert await play(leases) == 2
        assert (leases.counts.opened, leases.counts.discarded) == (2, 1)
        assert not client.connected


async def test_a_reset_has_a_deadline_of_its_own(urls: dict[str, str]) -> None:
    async with leases_on(urls["wide"], reset_s=0.1) as leases:
        with pytest.raises(RequestTimeout, match=r"a reset of .* within 0\.1 s.*env\.reset_timeout_s"):
            async with leases.lease() as session:
                await session.reset(seconds=60)


async def test_every_server_gets_its_share(urls: dict[str, str]) -> None:
    wide, other = urls["wide"], urls["other"]
    async with leases_on(wide, other, sessions=8) as leases:
        assert await share_of(leases, 8) == {wide: 4, other: 4}
        # What failed there and is over does not count against a server.
        for _ in range(10):
            with pytest.raises(ZeroDivisionError):
                async with leases.lease():
                    raise ZeroDivisionError
        async with asyncio.timeout(HANG_S):
            while leases.counts.closing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await share_of(leases, 8) == {wide: 4, other: 4}


async def test_sessions_on_a_server_that_is_off_the_list_finish_and_are_not_kept(
    urls: dict[str, str],
) -> None:
    async with leases_on(urls["wide"], sessions=4) as leases:
        async with leases.lease() as session:
            await session.reset()
            leases.replace([urls["other"]])
            assert leases.urls == (urls["other"],)
            assert await share_of(leases, 3) == {urls["other"]: 3}
            await session.step(Wait())
        assert await share_of(leases, 4) == {urls["other"]: 4}
        assert not session.client.connected
        assert leases.counts.discarded == 0


async def share_of(leases: SessionLeases, count: int) -> Counter[str]:
    hold = asyncio.Barrier(count)

    async def where() -> str:
        async with leases.lease() as session:
            await hold.wait()
            return session.url

    async with asyncio.timeout(HANG_S):
        return Counter(await asyncio.gather(*(where() for _ in range(count))))


@pytest.mark.soak
async def test_sessions_that_a_server_has_no_room_for_wait_for_the_others(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(address, "FULL_S", 0.05)
    # Waiting for the end of others' episodes is no failure of the server's, however long it takes.
    async with leases_on(urls["narrow"], sessions=8, connect_s=3.0) as leases:

        async def slow() -> None:
            async with leases.lease() as session:
                await session.reset()
                await session.step(Wait(seconds=0.5))

        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*(slow() for _ in range(24)))
        assert leases.counts.opened >= 3
    told = [record.getMessage() for record in caplog.records if record.name.startswith("rl_bridge.env")]
    assert len(told) == 1
    assert "fewer than the 8 sessions of env.sessions" in told[0]


@pytest.mark.soak
async def test_a_worker_gets_room_when_others_have_no_more_use_for_theirs(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "FULL_S", 0.05)
    monkeypatch.setattr(pool, "IDLE_S", 0.5)
    # A server without room can be reached: what bounds the wait is not how long that may take.
    async with (
        leases_on(urls["narrow"], sessions=2) as first,
        leases_on(urls["narrow"], connect_s=2.0, free_s=4.0) as hasty,
        leases_on(urls["narrow"], connect_s=2.0) as second,
    ):
        async with first.lease() as one, first.lease() as other:
            await asyncio.gather(one.reset(), other.reset())
            with pytest.raises(
                SessionUnavailable, match=r"within ([4-9]|\d\d)[\d.]* s, got none: CAPACITY_REACHED"
            ):
                await play(hasty)
            waiting = asyncio.ensure_future(play(second))
        assert first.counts.idle == 2
        async with asyncio.timeout(HANG_S):
            assert await waiting == 2
        await until_idle(first, 0)
        assert (first.counts.discarded, first.counts.free) == (0, 2)
        assert await play(first) == 2


async def until_idle(leases: SessionLeases, count: int) -> None:
    async with asyncio.timeout(HANG_S):
        while leases.counts.idle != count:  # noqa: ASYNC110 - it is about time
            await asyncio.sleep(0.01)


async def test_a_full_server_is_left_for_one_with_room(urls: dict[str, str]) -> None:
    wide, narrow = urls["wide"], urls["narrow"]
    async with leases_on(narrow, wide, sessions=8) as leases:
        hold = asyncio.Barrier(8)

        async def where() -> str:
            async with leases.lease() as session:
                await session.reset()
                await hold.wait()
                return session.url

        async with asyncio.timeout(HANG_S):
            assert Counter(await asyncio.gather(*(where() for _ in range(8)))) == {wide: 6, narrow: 2}


@pytest.mark.slow
async def test_a_server_that_nobody_runs_is_asked_again_until_the_deadline(urls: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with leases_on(dead, connect_s=3.0) as leases:
        with pytest.raises(SessionUnavailable, match=r"got none: expected an OpenEnv server"):
            await play(leases)
        assert 1 < leases.counts.failed < 10
        # It need not be the end: the list may change while one waits.
        leases.replace([dead])  # so that it is asked at once
        failed = leases.counts.failed
        waiting = asyncio.ensure_future(play(leases))
        async with asyncio.timeout(HANG_S):
            while leases.counts.failed == failed:  # noqa: ASYNC110 - it is about time
                await asyncio.sleep(0.01)
        leases.replace([dead, urls["wide"]])
        assert await waiting == 2


async def test_what_is_closed_lends_nothing_and_breaks_what_is_lent(urls: dict[str, str]) -> None:
    async with leases_on(urls["wide"], sessions=1) as leases:
        async with leases.lease() as session:
            await session.reset()
            waiting = asyncio.ensure_future(play(leases))
            stepping = asyncio.ensure_future(session.step(Wait(seconds=60)))
            await asyncio.sleep(0.05)
            await leases.close()
            outcome: Any = (await asyncio.gather(stepping, return_exceptions=True))[0]
            assert "broken off by this client" in str(outcome)
        with pytest.raises(RolloutError, match="some that were closed"):
            await waiting
