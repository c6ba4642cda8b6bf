"""A client of a full server waits for a session by itself, and reports how long it waited in vain."""

import asyncio
import json

import pytest
from counter import Add, Count, Counter, CountState
from counter_client import CounterEnv
from scripted import scripted
from serving import eventually, serving
from socket_servers import reply_seven
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from openenv_core import (
    CapacityError,
    ConnectionFailedError,
    ConnectionLostError,
    GenericEnvClient,
    StepResult,
)
from openenv_core.client import waiting
from openenv_core.client.servers import Servers
from servers import create_app
from servers.app import EnvironmentApp

FULL = {"message": "no room", "code": "CAPACITY_REACHED", "active_sessions": 2, "max_sessions": 2}


def app_of(cap: int) -> EnvironmentApp:
    return create_app(Counter, Add, Count, max_concurrent_envs=cap, state_cls=CountState)


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_clients_wait_for_a_slot_without_retry_code(transport: str) -> None:
    app = app_of(2)
    async with serving(app) as address:

        async def play(number: int) -> int:
            async with CounterEnv(f"http://{address}", transport=transport) as env:
                await env.reset(seed=number % 5)
                assert app.sessions.active <= 2
                return (await env.step(Add(amount=1))).observation.total

        assert await asyncio.gather(*map(play, range(12))) == [number % 5 + 1 for number in range(12)]
        await eventually(lambda: app.sessions.active == 0)


async def test_server_without_a_queue_is_retried_until_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MIN_BACKOFF_S", 0.005)
    attempts = 0

    async def handler(ws: ServerConnection) -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 5:
            await ws.send(json.dumps({"type": "error", "data": FULL}))
        else:
            await reply_seven(ws)

    async with scripted(handler) as url, CounterEnv(url) as env:
        assert (await env.reset()).observation.total == 7
        assert attempts == 5


@pytest.mark.parametrize("first", ["reset", "connect", "vector"])
@pytest.mark.parametrize("status", [503, 429])
async def test_refused_handshake_is_retried(first: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MIN_BACKOFF_S", 0.005)
    attempts = 0

    def refuse(ws: ServerConnection, _: Request) -> Response | None:
        nonlocal attempts
        attempts += 1
        return ws.respond(status, "no room") if attempts < 4 else None

    async with scripted(reply_seven, process_request=refuse) as url:
        with pytest.raises(CapacityError, match="no room"):
            await CounterEnv(url, queue_timeout_s=0).connect()
        env = CounterEnv(url)
        if first == "vector":
            with pytest.raises(ConnectionFailedError, match="to speak ropewalk"):
                await env.vector(1)
        else:
            await getattr(env, first)()
        assert attempts == 4
        await env.close()


@pytest.mark.slow
async def test_failed_wait_reports_its_length_and_place() -> None:
    app = app_of(1)
    async with serving(app) as address, CounterEnv(f"http://{address}") as first:
        await first.reset()
        for transport in ("websocket", "http"):
            async with CounterEnv(f"http://{address}", transport=transport, queue_timeout_s=1) as second:
                with pytest.raises(CapacityError, match="this client has waited for") as refused:
                    await second.reset()
                assert (refused.value.place, refused.value.max_sessions) == (1, 1)
                assert refused.value.waited_s is not None
                assert refused.value.waited_s >= 0.5
        async with GenericEnvClient(f"http://{address}", queue_timeout_s=0.5) as third:
            with pytest.raises(CapacityError, match="place 1 in the queue") as full:
                await third.vector(1)
            assert full.value.place == 1
        await eventually(lambda: app.sessions.queue.capacity()["waiting"] == 0)
        async with CounterEnv(f"http://{address}", queue_timeout_s=0) as hurried:
            with pytest.raises(CapacityError, match="1 of 1 in use; try again later"):
                await hurried.reset()


@pytest.mark.parametrize("waits", ["reset", "vector"])
async def test_wait_in_the_queue_is_logged_once(
    waits: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "_NOTICE_AFTER_S", 0.05)
    async with serving(app_of(1)) as address, CounterEnv(f"http://{address}") as first:
        await first.reset()
        second = CounterEnv(f"http://{address}")
        getting = asyncio.create_task(second.reset() if waits == "reset" else second.vector(1))
        await eventually(lambda: caplog.messages)
        await first.disconnect()
        if not isinstance(got := await getting, StepResult):
            await got.close()
        await second.close()
    assert ["waiting for a session" in message for message in caplog.messages] == [True]


async def test_every_server_is_tried_before_capacity_error() -> None:
    full, free = app_of(1), app_of(1)
    async with serving(full) as one, serving(free) as two, CounterEnv(f"http://{one}") as first:
        await first.reset()
        urls = [f"http://{one}", f"http://{two}"]
        second = CounterEnv(urls, queue_timeout_s=0)
        second._session.servers = Servers(urls)  # in this order, not one that is drawn
        async with second:
            assert (await second.reset(seed=3)).observation.total == 3
            async with CounterEnv(urls, queue_timeout_s=0) as third:
                with pytest.raises(CapacityError, match="1 of 1 in use; try again later") as refused:
                    await third.reset()
                assert (refused.value.active_sessions, refused.value.max_sessions) == (1, 1)


async def test_servers_that_move_faster_than_they_answer_are_not_tried_for_ever() -> None:
    class Moving:
        lists = 0

        def start(self) -> str:
            return self.urls()[0]

        def stop(self) -> None: ...

        def urls(self) -> list[str]:
            self.lists += 1
            assert self.lists < 50, "still tried"
            return [f"http://server-{self.lists}:8000"]

    servers = Servers([], moving := Moving())

    async def connect() -> None:
        raise ConnectionFailedError(await servers.locate())

    with pytest.raises(ConnectionFailedError, match="server-"):
        await servers.attempt(connect, waiting.SlotWait(60.0))
    assert moving.lists > 2  # new ones are tried


@pytest.mark.slow
async def test_waiting_for_a_slot_does_not_count_against_the_request_timeout() -> None:
    app = app_of(1)
    async with (
        serving(app) as address,
        CounterEnv(f"http://{address}") as first,
        CounterEnv(f"http://{address}", message_timeout_s=1.0) as second,
        CounterEnv(f"http://{address}", queue_timeout_s=1.3) as third,
    ):
        await first.reset()
        waits = asyncio.create_task(second.reset(seed=3))
        await eventually(lambda: app.sessions.queue.capacity()["waiting"] == 1)
        with pytest.raises(CapacityError):
            await third.reset()
        second._session.conversation._timeout_s = 60  # type: ignore[union-attr]  # of what comes now
        await first.disconnect()
        assert (await waits).observation.total == 3


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_cancelled_or_closed_client_leaves_the_queue_at_once(how: str) -> None:
    app = app_of(1)
    async with serving(app) as address, CounterEnv(f"http://{address}") as first:
        await first.reset()
        env = CounterEnv(f"http://{address}")
        waits = asyncio.create_task(env.reset())
        await eventually(lambda: app.sessions.queue.capacity()["waiting"] == 1)
        if how == "cancel":
            waits.cancel()
        await env.close()
        with pytest.raises((asyncio.CancelledError, ConnectionLostError)):
            await waits
        await eventually(lambda: app.sessions.queue.capacity()["waiting"] == 0)


async def test_client_closed_between_two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MIN_BACKOFF_S", 600.0)
    monkeypatch.setattr(waiting, "MAX_BACKOFF_S", 600.0)

    attempts = []

    async def handler(ws: ServerConnection) -> None:
        attempts.append(ws)
        await ws.send(json.dumps({"type": "error", "data": FULL}))

    async with scripted(handler) as url:
        env = CounterEnv(url)
        waits = asyncio.create_task(env.reset())
        await eventually(lambda: env._session._ending is not None)
        await asyncio.wait([waits], timeout=0.2)
        assert len(attempts) == 1  # the next is ten minutes away
        await env.close()
        with pytest.raises(CapacityError, match="no room"):
            await waits
