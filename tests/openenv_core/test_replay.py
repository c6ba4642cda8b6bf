"""Episodes that outlive their server: replayed on another, or EpisodeLostError."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from counter import Add, Count, Counter
from counter_client import CounterEnv
from scripted import scripted
from serving import eventually, open_session, reconfigured, rpc, serving
from socket_servers import frame
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from openenv_core import (
    CapacityError,
    ConfigurationError,
    ConnectionFailedError,
    ConnectionLostError,
    EpisodeLostError,
    ExecutionError,
    RequestTimeoutError,
    make,
)
from openenv_core.client import replay as replaying
from openenv_core.client import waiting
from openenv_core.client.conversation import PendingCall
from openenv_core.client.replay import MAX_LOSSES, Journal
from openenv_core.protocol.http import DETERMINISTIC_HEADER
from servers import create_app

DEAD = "http://127.0.0.1:9"


class Fickle(Counter):
    """Says nothing of being deterministic."""

    DETERMINISTIC = False


class Drifting(Counter):
    """Says that it is deterministic, and is not from a certain total on."""

    def step(self, action: Add) -> Count:
        observation = super().step(action)
        return (
            observation
            if observation.total < 5
            else observation.model_copy(update={"extra": random.random()})
        )


class Stamped(Counter):
    """Tells something else each time, but in the metadata and the texts of errors."""

    def step(self, action: Add) -> Count:
        if action.amount == 0:
            raise RuntimeError(f"something {random.random()}")
        return super().step(action).model_copy(update={"metadata": {"at": random.random()}})


class Deep(Counter):
    """Begins where the seed says, far below the limit; without one anywhere."""

    def reset(self, *, seed: int | None = None, episode_id: str | None = None, start: int = 0) -> Count:
        depth = random.getrandbits(31) if seed is None else seed
        return super().reset(seed=-depth, episode_id=episode_id, start=start)


class Servers:
    """Servers of one app each that can be ended one by one."""

    def __init__(self) -> None:
        self._stacks: dict[str, AsyncExitStack] = {}

    async def start(self, env: type[Counter] = Counter, sessions: int = 8) -> str:
        stack = AsyncExitStack()
        app = create_app(env, Add, Count, max_concurrent_envs=sessions)
        url = "http://" + await stack.enter_async_context(serving(app))
        self._stacks[url] = stack
        return url

    async def end(self, url: str | None) -> None:
        assert url is not None
        await self._stacks.pop(url).aclose()

    async def end_all(self) -> None:
        for url in list(self._stacks):
            await self.end(url)


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    servers = Servers()
    yield servers
    await servers.end_all()


def telling(handler: Callable[[ServerConnection], Awaitable[None]]) -> AbstractAsyncContextManager[str]:
    """A server that says of its environment that it is deterministic, and answers as a test says."""

    async def tell(_: ServerConnection, __: Request, response: Response) -> None:
        response.headers[DETERMINISTIC_HEADER] = "true"

    return scripted(handler, process_response=tell)


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_episode_continues_on_another_server(servers: Servers, transport: str) -> None:
    urls = [await servers.start(Deep), await servers.start(Deep)]
    async with CounterEnv(urls, transport=transport) as env:
        total = (await env.reset(start=1)).observation.total
        before = await env.state()
        for amount in (-2, -3):
            total += amount
            assert (await env.step(Add(amount=amount))).observation.total == total
        first = env.base_url
        await servers.end(first)
        assert (await env.step(Add(amount=-1))).observation.total == total - 1
        assert env.base_url != first
        after = await env.state()
        assert (after.episode_id, after.step_count) == (before.episode_id, 3)
        assert (await env.reset(seed=3)).observation.total == -3


async def test_sync_client_continues_on_another_server(servers: Servers) -> None:
    env = make([await servers.start(), await servers.start()], client=CounterEnv)
    assert (await asyncio.to_thread(env.reset, seed=2)).observation.total == 2
    await servers.end(env.base_url)
    assert (await asyncio.to_thread(env.step, Add(amount=1))).observation.total == 3
    await asyncio.to_thread(env.close)


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_nondeterministic_environment_loses_its_episode(servers: Servers, transport: str) -> None:
    urls = [await servers.start(Fickle), await servers.start(Fickle)]
    async with CounterEnv(urls, transport=transport) as env:
        assert (await env.reset()).observation.total == 0  # no seed was drawn
        await env.step(Add(amount=1))
        await servers.end(env.base_url)
        for _ in range(2):
            with pytest.raises(EpisodeLostError, match="DETERMINISTIC"):
                await env.step(Add(amount=1))
        with pytest.raises(ConnectionLostError):
            await env.state()
        assert (await env.reset(seed=1)).observation.total == 1


async def test_replay_that_differs_names_the_step(servers: Servers) -> None:
    urls = [await servers.start(Drifting), await servers.start(Drifting)]
    async with CounterEnv(urls) as env:
        await env.reset(seed=1)
        for _ in range(4):
            await env.step(Add(amount=2))
        await servers.end(env.base_url)
        with pytest.raises(
            EpisodeLostError, match=r"step 2 of the episode .*\"total\": 5.*ropewalk validate"
        ):
            await env.step(Add(amount=2))
        with pytest.raises(EpisodeLostError, match="step 2"):
            await env.state()
        assert (await env.reset(seed=1)).observation.total == 1


@pytest.mark.parametrize("first", [0, 1])
async def test_both_servers_must_declare_determinism(servers: Servers, first: int) -> None:
    urls = [await servers.start(), await servers.start(Fickle)]
    async with next(env for _ in range(99) if (env := CounterEnv(urls)).base_url == urls[first]) as env:
        await env.reset(seed=1)
        await servers.end(urls[first])
        with pytest.raises(EpisodeLostError, match="server does not say"):
            await env.step(Add(amount=1))


async def test_metadata_and_texts_of_errors_may_differ(servers: Servers) -> None:
    urls = [await servers.start(Stamped), await servers.start(Stamped)]
    async with CounterEnv(urls) as env:
        await env.reset(seed=1)
        await env.step(Add(amount=1))
        with pytest.raises(ExecutionError):
            await env.step(Add(amount=0))
        await servers.end(env.base_url)
        assert (await env.step(Add(amount=1))).observation.total == 3


async def test_refused_reset_keeps_the_episode_replayable(servers: Servers) -> None:
    urls = [await servers.start(), await servers.start()]
    async with CounterEnv(urls) as env:
        await env.reset(seed=9)
        await env.reset(seed=1)
        await env.step(Add(amount=1))
        with pytest.raises(ExecutionError):
            await env.reset(start="x")
        await servers.end(env.base_url)
        assert (await env.step(Add(amount=1))).observation.total == 3
        await servers.end_all()
        env._session.settings = replace(env._session.settings, connect_timeout_s=0.1)
        with pytest.raises(EpisodeLostError, match=r"no server was found .* within 0.1 s"):
            await env.step(Add(amount=1))
        with pytest.raises(ConnectionFailedError):
            await env.reset()


@pytest.mark.parametrize("fresh", [False, True])
async def test_full_surviving_server_is_waited_for(
    servers: Servers, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SEVERAL_QUEUE_S", 0.05)
    urls = [await servers.start(), await servers.start(sessions=1)]
    async with CounterEnv(urls[1]) as holder, CounterEnv(urls) as env:
        env._session.settings = replace(env._session.settings, connect_timeout_s=0.8)
        while env.base_url != urls[0]:
            env._session.servers.use_next()
        await env.disconnect()
        await env.reset(seed=1)
        await holder.reset()
        await servers.end(urls[0])
        going_on = asyncio.create_task(env.reset(seed=1) if fresh else env.step(Add(amount=1)))
        await asyncio.wait([going_on], timeout=1)
        assert not going_on.done()
        await holder.disconnect()
        assert (await going_on).observation.total == (1 if fresh else 2)


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_restarted_server_at_the_same_address_is_used(transport: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        async with serving(create_app(Counter, Add, Count), place) as address:
            env = CounterEnv(f"http://{address}", transport=transport)
            await env.reset(seed=1)
            await env.step(Add(amount=1))
        under_way = asyncio.create_task(env.step(Add(amount=1)))
        async with serving(create_app(Counter, Add, Count), place), env:
            assert (await under_way).observation.total == 3


async def test_session_ended_by_the_server_is_replayed_over_http() -> None:
    app = create_app(Counter, Add, Count)
    async with serving(app) as address, CounterEnv(f"http://{address}", transport="http") as env:
        await env.reset(seed=1)
        await env.step(Add(amount=1))
        [session] = app.state.sessions.standing
        await rpc(address, "openenv/session/close", {"session_id": session.id})
        assert (await env.state()).total == 2


async def test_cancelled_requests_are_replayed_too() -> None:
    steps, came, proceed = 0, asyncio.Event(), asyncio.Event()

    async def handler(ws: ServerConnection) -> None:
        nonlocal steps
        total = 0
        async for text in ws:
            message = json.loads(text)
            if message["type"] == "step":
                steps += 1
                total += message["data"]["amount"]
                if steps == 1:
                    came.set()
                    await proceed.wait()
                if steps == 3:
                    ws.transport.abort()
                    return
            await ws.send(frame(total))

    async with telling(handler) as url, CounterEnv(url) as env:
        await env.reset()
        given_up = asyncio.create_task(env.step(Add(amount=4)))
        await came.wait()
        given_up.cancel()
        proceed.set()
        assert (await env.step(Add(amount=2))).observation.total == 6
        assert (await env.step(Add(amount=1))).observation.total == 7
        assert steps == 6


async def test_request_that_kills_servers_is_retried_a_bounded_number_of_times() -> None:
    met = 0

    async def handler(ws: ServerConnection) -> None:
        nonlocal met
        met += 1
        async for text in ws:
            if "step" in str(text):
                ws.transport.abort()
                return
            await ws.send(frame(1))

    async with telling(handler) as url, CounterEnv(url) as env:
        await env.reset()
        with pytest.raises(EpisodeLostError, match=f"on {MAX_LOSSES} connections"):
            await env.step(Add(amount=1))
        assert met == MAX_LOSSES
        with pytest.raises(EpisodeLostError):
            await env.step(Add(amount=1))
        assert met == MAX_LOSSES


@pytest.mark.parametrize("how", ["close", "disconnect"])
async def test_closing_ends_the_search_for_another_server(servers: Servers, how: str) -> None:
    env = CounterEnv(await servers.start())
    await env.reset(seed=1)
    await servers.end(env.base_url)
    under_way = asyncio.create_task(env.step(Add(amount=1)))
    await eventually(lambda: not env.connected)
    await getattr(env, how)()
    with pytest.raises(ConnectionLostError):
        await under_way
    await env.close()


async def test_cancelled_search_restarts_with_the_next_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        async with serving(create_app(Counter, Add, Count), place) as address:
            env = CounterEnv(f"http://{address}")
            await env.reset(seed=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await env.step(Add(amount=1))
        async with serving(create_app(Counter, Add, Count), place), env:
            assert (await env.step(Add(amount=2))).observation.total == 3


async def test_attached_session_is_not_replayed(servers: Servers) -> None:
    urls = [await servers.start()]
    session = await open_session(urls[0].removeprefix("http://"))
    async with CounterEnv(urls[0], session_id=session) as env:
        await env.reset(seed=1)
        await servers.end(urls[0])
        for _ in range(2):
            with pytest.raises(ConnectionLostError) as lost:
                await env.step(Add(amount=1))
            assert type(lost.value) is ConnectionLostError


async def test_fork_is_made_on_the_server_of_the_episode(servers: Servers) -> None:
    urls = [await servers.start() for _ in range(4)]
    async with CounterEnv(urls) as env:
        await env.reset(seed=1)
        await servers.end(env.base_url)
        children = await env.fork(3)
        for child in children:
            assert child.base_url == env.base_url
            assert (await child.step(Add(amount=2))).observation.total == 3
        await servers.end(env.base_url)
        with pytest.raises(EpisodeLostError, match="no reset has begun it"):
            await children[0].step(Add(amount=1))
        assert (await env.step(Add(amount=1))).observation.total == 2


# Several URLs


@pytest.mark.slow
async def test_clients_spread_over_servers_and_skip_dead_ones(servers: Servers) -> None:
    urls = [await servers.start(sessions=2), DEAD, await servers.start(sessions=2)]
    first = CounterEnv(urls)
    clients = [first, *[await first.new_session() for _ in range(3)]]
    for client in clients:
        await client.reset()
    assert sorted(str(client.base_url) for client in clients) == sorted([urls[0], urls[2]] * 2)
    with pytest.raises(CapacityError):
        await CounterEnv([urls[0], urls[2]], queue_timeout_s=0).reset()
    await first.close()
    assert {CounterEnv(urls).base_url for _ in range(60)} == set(urls)
    with pytest.raises(ConnectionFailedError):
        await CounterEnv([DEAD, DEAD]).connect()
    with pytest.raises(ConfigurationError, match="empty"):
        CounterEnv([])
    with pytest.raises(ConfigurationError, match="starts with"):
        CounterEnv([DEAD, "ftp://h"])


# Seeds


def test_missing_seeds_are_drawn_from_the_last_given_one() -> None:
    def drawn_seeds(journal: Journal) -> list[Any]:
        return [journal.complete({"seed": seed}, True)["seed"] for seed in (7, None, None, 8, None)]

    assert drawn_seeds(Journal()) == drawn_seeds(Journal())
    assert len(set(drawn_seeds(Journal()))) == 5
    drawn = Journal().complete({"start": 1}, True)
    assert 0 <= drawn["seed"] < 2**31
    assert drawn["start"] == 1
    assert drawn != Journal().complete({"start": 1}, True)
    assert Journal().complete({"seed": 3, "episode_id": "e"}, True) == {"seed": 3, "episode_id": "e"}
    assert Journal().complete({"seed": None}, False) == {"seed": None}
    assert Journal().complete({"seed": "x"}, True)["seed"] == "x"  # the server says what is wrong with it


async def test_a_wait_for_a_slot_takes_no_seed_out_of_the_series(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, refused, pause = [], asyncio.Event(), waiting.SlotWait.pause

    class Noted(Counter):
        def reset(self, *, seed: int | None = None) -> Count:
            seeds.append(seed)
            return super().reset()

    async def pause_noted(wait: waiting.SlotWait, *args: Any) -> None:
        refused.set()
        await pause(wait, *args)

    monkeypatch.setattr(waiting.SlotWait, "pause", pause_noted)
    app = reconfigured(create_app(Noted, max_concurrent_envs=1), max_wait_s=0.0)
    async with serving(app) as address, CounterEnv(f"http://{address}") as env:
        await env.reset(seed=7)
        await env.disconnect()
        async with CounterEnv(f"http://{address}") as other:
            await other.reset(seed=1)
            resetting = asyncio.create_task(env.reset())
            await refused.wait()
        await resetting
        await env.reset()
    series = random.Random(7)
    assert seeds == [7, 1, series.getrandbits(31), series.getrandbits(31)]


# Bounds


async def test_long_episode_is_compared_by_digests_and_a_too_long_one_is_not_kept(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "MAX_BYTES", 1500)
    urls = [await servers.start(Drifting) for _ in range(4)]
    async with CounterEnv(urls) as env:
        await env.reset(seed=1)
        for _ in range(9):
            await env.step(Add(amount=0))
        assert env._session.journal._bytes <= 1500
        await servers.end(env.base_url)
        assert (await env.step(Add(amount=0))).observation.total == 1
        await env.step(Add(amount=4))
        for _ in range(4):
            await env.step(Add(amount=-1))
        await servers.end(env.base_url)
        with pytest.raises(EpisodeLostError, match=r"step 11 of the episode .* with another reply"):
            await env.step(Add(amount=0))
        await env.reset(seed=1)
        for _ in range(30):
            await env.step(Add(amount=0))
        await servers.end(env.base_url)
        with pytest.raises(EpisodeLostError, match="longer than"):
            await env.step(Add(amount=0))
        monkeypatch.setattr(replaying, "MAX_REQUESTS", 4)
        await env.reset(seed=1)
        for obstacle in (None, None, None, replaying._TOO_LONG):
            await env.step(Add(amount=0))
            assert env._session.journal.obstacle == obstacle


@pytest.mark.parametrize("first", ["a little", "much"])
async def test_replies_that_nobody_waited_for_count_too(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "MAX_BYTES", 3000)
    proceed, filler = asyncio.Event(), "x" * 2000
    lengths = [10, 2000, 2000] if first == "a little" else [2000, 2000, 10]
    lives = 0

    async def handler(ws: ServerConnection) -> None:
        nonlocal lives
        lives += 1
        number = 0
        async for _ in ws:
            number += 1
            if lives == 1 and number == 2:
                await proceed.wait()
            if lives == 1 and number == 6:
                ws.transport.abort()
                return
            await ws.send(frame(number, filler[: lengths[number - 2]] if 1 < number < 5 else ""))

    async with telling(handler) as url, CounterEnv(url, message_timeout_s=None) as env:
        await env.reset()
        conversation: Any = env._session.conversation
        conversation._timeout_s = 0.02
        for amount in range(3):
            with pytest.raises(RequestTimeoutError):
                await env.step(Add(amount=amount))
        conversation._timeout_s = 60
        proceed.set()
        assert (await env.step(Add(amount=1))).observation.total == 5
        held = [
            outcome
            for _, _, outcome in env._session.journal._entries
            if isinstance(outcome, bytes | bytearray)
        ]
        assert sum(map(len, held)) < 3000
        assert not any(isinstance(outcome, PendingCall) for _, _, outcome in env._session.journal._entries)
        # The replies are those of the episode, so it can be played again elsewhere.
        assert (await env.step(Add(amount=1))).observation.total == 6
        assert lives == 2
