import asyncio
import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from counter import Add, AsyncCounter, Awkward, Count, Counter, CountState, SlowAsync, Unbuildable
from counter_client import CounterEnv
from scripted import scripted
from serving import eventually, serving
from websockets.asyncio.server import ServerConnection

from openenv_core import (
    Action,
    CapacityReached,
    ClientClosed,
    ConfigurationError,
    ConnectionFailed,
    ConnectionLost,
    EnvClient,
    ExecutionFailed,
    FactoryFailed,
    GenericEnvClient,
    LocalProcessProvider,
    Observation,
    OpenEnvError,
    ProtocolError,
    RequestTimeout,
    SessionFailed,
    StepResult,
    ValidationFailed,
)
from openenv_core.client.session import websocket_url
from openenv_core.protocol.urls import shown
from servers import create_app

SUPPORT = str(Path(__file__).parents[1] / "support")


class Dawdling(Counter):
    """Its first step waits until it is told to go on."""

    BLOCKING = True
    proceed = threading.Event()

    def step(self, action: Add) -> Count:
        self.proceed.wait(60)
        return super().step(action)


def frame(total: int) -> str:
    data = {"observation": {"total": total}, "reward": None, "done": False}
    return json.dumps({"type": "observation", "data": data})


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_an_episode(scheme: str) -> None:
    async with serving(create_app(Counter, Add, Count)) as address:
        url = f"{scheme}://{address}"
        async with CounterEnv(base_url=url) as env:
            assert (env.base_url, env._base_url) == (url, url)
            first = await env.reset(seed=3, episode_id="e")
            assert first == StepResult(Count(total=3), None, False, None)
            then = await env.step(Add(amount=7))
            assert then == StepResult(Count(total=10, reward=1, done=True), 1, True, None)
            state = await env.state()
            assert isinstance(state, CountState)
            assert (state.episode_id, state.total) == ("e", 10)
            with pytest.raises(ExecutionFailed, match=r"call reset\(\)") as failed:
                await env.step(Add(amount=1))
            assert failed.value.code == "EXECUTION_ERROR"
            assert (await env.reset()).observation.total == 0


async def test_dicts_for_models() -> None:
    async with (
        serving(create_app(Awkward, Add, Count)) as address,
        GenericEnvClient(f"http://{address}") as env,
    ):
        assert (await env.reset()).observation == {"metadata": {}, "total": 0, "extra": None}
        result = await env.step({"amount": 8})
        assert (result.reward, result.done, result.metadata) == (True, False, {"why": "because"})
        assert (await env.state())["step_count"] == 0
        with pytest.raises(ValidationFailed, match="amount: Input should be") as failed:
            await env.step({"amount": "x"})
        assert failed.value.errors[0]["loc"] == ["amount"]
        with pytest.raises(TypeError, match="expected a dict"):
            await env.step(3)  # type: ignore[arg-type]


async def test_bytes_arrive_as_they_left() -> None:
    class Blob(Action):
        payload: bytes

    class Echo(Observation):
        payload: bytes = b""

    class Echoing(Counter):
        def step(self, action: Any) -> Any:
            return Echo(payload=action.payload[::-1])

    class EchoEnv(EnvClient[Blob, Echo]):
        action_type = Blob
        observation_type = Echo

    async with serving(create_app(Echoing, Blob, Echo)) as address, EchoEnv(f"http://{address}") as env:
        assert (await env.step(Blob(payload=b"\xff\x00ab"))).observation.payload == b"ba\x00\xff"


async def test_an_action_of_another_type_is_refused_before_it_is_sent() -> None:
    async with serving(create_app(Counter, Add, Count)) as address, CounterEnv(f"http://{address}") as env:
        with pytest.raises(TypeError, match="expected Add"):
            await env.step(Action())  # type: ignore[arg-type]
        assert (await env.reset()).observation.total == 0


async def test_a_released_subclass_brings_its_own_hooks() -> None:
    class Released(EnvClient[Add, int, str]):
        def _step_payload(self, action: Add) -> dict[str, Any]:
            return {"amount": action.amount}

        def _parse_result(self, payload: dict[str, Any]) -> StepResult[int]:
            return StepResult(
                payload["observation"]["total"], payload.get("reward"), payload.get("done", False)
            )

        def _parse_state(self, payload: dict[str, Any]) -> str:
            return str(payload["episode_id"])

    async with serving(create_app(Counter, Add, Count)) as address, Released(f"http://{address}") as env:
        await env.reset(episode_id="e")
        assert await env.step(Add(amount=2)) == StepResult(2, 1, False)
        assert await env.state() == "e"


async def test_a_timeout_keeps_the_session_and_shifts_nothing() -> None:
    proceed = asyncio.Event()

    async def handler(ws: ServerConnection) -> None:
        number = 0
        async for _ in ws:
            number += 1
            if number == 2:
                await proceed.wait()
            await ws.send(frame(number))

    async with scripted(handler) as url, CounterEnv(url, message_timeout_s=0.2) as env:
        await env.reset()
        with pytest.raises(RequestTimeout, match=r"within 0.2 s.*lives on"):
            await env.step(Add(amount=1))
        with pytest.raises(RequestTimeout):  # it waits for the one before
            await env.step(Add(amount=1))
        assert env.connected
        proceed.set()
        assert (await env.step(Add(amount=1))).observation.total == 4
        assert (await env.reset()).observation.total == 5


async def test_an_episode_outlives_a_timeout() -> None:
    async with (
        serving(create_app(Dawdling, Add, Count)) as address,
        CounterEnv(f"http://{address}", message_timeout_s=0.2) as env,
    ):
        await env.reset(seed=1)
        with pytest.raises(RequestTimeout):
            await env.step(Add(amount=2))
        Dawdling.proceed.set()
        state = await env.state()
        assert (state.total, state.step_count) == (3, 1)  # the step was made, and its reply dropped
        assert (await env.step(Add(amount=1))).observation.total == 4


async def test_what_a_session_said_last_is_told_after_a_timeout() -> None:
    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        await proceed.wait()
        data = {"message": "took too long", "code": "SESSION_ERROR"}
        await ws.send(json.dumps({"type": "error", "data": data}))

    proceed = asyncio.Event()
    async with scripted(handler) as url, CounterEnv(url, message_timeout_s=0.2) as env:
        with pytest.raises(RequestTimeout):
            await env.reset()
        proceed.set()
        with pytest.raises(SessionFailed, match="took too long"):
            await env.step(Add(amount=1))
        assert not env.connected


async def test_a_late_timer_spares_the_next_request() -> None:
    app = create_app(AsyncCounter, Add, Count)
    async with serving(app) as address, CounterEnv(f"http://{address}", message_timeout_s=0.5) as env:
        await env.reset()
        await asyncio.sleep(0.3)
        await env.reset()
        await asyncio.sleep(0.3)  # the timer of the first request has gone off
        assert (await env.reset(seed=2)).observation.total == 2


async def test_a_cancelled_request_shifts_no_later_reply() -> None:
    proceed = asyncio.Event()

    async def handler(ws: ServerConnection) -> None:
        number = 0
        async for _ in ws:
            number += 1
            if number == 1:
                await proceed.wait()
            await ws.send(frame(number))

    async with scripted(handler) as url, CounterEnv(url) as env:
        for _ in range(2):
            request = asyncio.create_task(env.reset())
            await asyncio.sleep(0.05)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        proceed.set()
        assert (await env.reset()).observation.total == 3
        assert (await env.reset()).observation.total == 4


async def test_callers_take_turns() -> None:
    async with (
        serving(create_app(AsyncCounter, Add, Count)) as address,
        CounterEnv(f"http://{address}") as env,
    ):
        await env.reset()
        results = await asyncio.gather(*(env.step(Add(amount=1)) for _ in range(5)))
        assert [r.observation.total for r in results] == [1, 2, 3, 4, 5]


async def test_why_a_session_was_refused() -> None:
    async with (
        serving(create_app(Counter, Add, Count)) as address,
        CounterEnv(f"http://{address}") as first,
        CounterEnv(f"http://{address}") as second,
    ):
        await first.reset()
        with pytest.raises(CapacityReached) as refused:
            await second.reset()
        assert (refused.value.active_sessions, refused.value.max_sessions) == (1, 1)
        assert not second.connected
        await first.disconnect()
        async with asyncio.timeout(20):
            while True:
                try:
                    assert (await second.reset(seed=1)).observation.total == 1
                    break
                except CapacityReached:
                    await asyncio.sleep(0.01)
    async with (
        serving(create_app(Unbuildable, Add, Count)) as address,
        CounterEnv(f"http://{address}") as env,
    ):
        with pytest.raises(FactoryFailed, match="no such counter") as failed:
            await env.reset()
        assert failed.value.factory_name == "Unbuildable"


async def test_a_lost_connection() -> None:
    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        await ws.send(frame(1))
        await ws.recv()
        ws.transport.abort()

    async with scripted(handler) as url, CounterEnv(url) as env:
        await env.reset()
        with pytest.raises(ConnectionLost):
            await env.step(Add(amount=1))
        with pytest.raises(ConnectionLost):
            await env.state()
        assert (await env.reset()).observation.total == 1  # in a session of its own


@pytest.mark.parametrize(
    "reply",
    [
        "{",
        "[]",
        "{}",
        '{"type":"state","data":{}}',
        '{"type":"observation","data":{"observation":{"no":1}}}',
        b"\xff",
    ],
)
async def test_replies_that_are_not_the_wire(reply: str | bytes) -> None:
    async def handler(ws: ServerConnection) -> None:
        async for _ in ws:
            await ws.send(reply)

    async with scripted(handler) as url, CounterEnv(url) as env:
        with pytest.raises(ProtocolError, match="expected"):
            await env.reset()


async def test_nobody_there() -> None:
    with pytest.raises(ConnectionFailed, match="check that it runs") as failed:
        await CounterEnv("http://127.0.0.1:9").reset()
    assert isinstance(failed.value, OpenEnvError)
    app = create_app(Counter, Add, Count)
    async with serving(app) as address:
        with pytest.raises(ConnectionFailed):
            await CounterEnv(f"http://{address}/nowhere").connect()


async def test_closing_ends_a_request_that_waits() -> None:
    env_class = SlowAsync.fresh()
    async with serving(create_app(env_class, Add, Count)) as address:
        env = CounterEnv(f"http://{address}", message_timeout_s=None)
        request = asyncio.create_task(env.step(Add(amount=1)))
        await eventually(env_class.entered.is_set)
        await env.close()
        with pytest.raises(ConnectionLost):
            await request


async def test_a_closed_client() -> None:
    app = create_app(Counter, Add, Count)
    async with serving(app) as address:
        env = CounterEnv(f"http://{address}")
        await env.reset()
        await env.close()
        await env.close()
        with pytest.raises(ClientClosed):
            await env.reset()
        await eventually(lambda: app.state.sessions.active == 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the first loop's socket
def test_a_second_event_loop() -> None:
    with CounterEnv.from_process(cwd=SUPPORT) as server:
        env = CounterEnv(server.base_url)
        assert asyncio.run(env.reset(seed=1)).observation.total == 1
        with pytest.raises(ConnectionLost, match=r"one asyncio\.run\(\), or use sync\(\)"):
            asyncio.run(env.step(Add(amount=1)))
        assert asyncio.run(env.reset(seed=2)).observation.total == 2

        async def elsewhere() -> None:
            with pytest.raises(ConfigurationError, match="got a second loop"):
                await asyncio.to_thread(asyncio.run, env.state())
            assert (await env.state()).total == 3
            await env.close()

        async def play() -> None:
            await env.reset(seed=3)
            await elsewhere()

        asyncio.run(play())
        gc.collect()  # while the warning of the socket is ignored


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the connections of loops that have closed
@pytest.mark.parametrize("transport", ["websocket", "http"])
def test_a_loop_that_has_closed_leaves_no_session_at_the_server(transport: str) -> None:
    async def again(env: CounterEnv) -> int:
        async with asyncio.timeout(20):  # the server has to notice
            while True:
                try:
                    return (await env.reset(seed=2)).observation.total
                except CapacityReached:
                    await asyncio.sleep(0.01)

    gc.disable()  # it would close the connection in the end
    try:
        with LocalProcessProvider("solo:app", cwd=SUPPORT) as provider:
            env = CounterEnv(provider.url, transport=transport)
            assert asyncio.run(env.reset(seed=1)).observation.total == 1
            with pytest.raises(ConnectionLost, match="event loop"):
                asyncio.run(env.step(Add(amount=1)))
            assert asyncio.run(again(env)) == 2
            assert asyncio.run(again(env)) == 2
            asyncio.run(env.close())
    finally:
        gc.enable()
        gc.collect()  # while the warnings of the sockets are ignored


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://me:hush@h:1/base?key=hush#hush", "https://h:1/base"),
        ("ws://h/@me/ws", "ws://h/@me/ws"),
        ("http://hush@h", "http://h"),
        ("http://me:hush@[::1", "...@[::1"),
        ("http://me:hu?sh@h", "...@h"),
        ("http://me:hu/sh@h/x?hush", "...@h/x"),
        ("me:hush@h:1", "...@h:1"),
        ("http://h:80a0?hush", "http://h:80a0"),
        ("blackjack", "blackjack"),
    ],
)
def test_what_messages_show_of_a_url(url: str, words: str) -> None:
    assert shown(url) == words


def test_a_url_that_is_none_is_told_without_its_password() -> None:
    for url in ("ftp://me:hush@h", "me:hush@h:1", "http://me:hush@[::1"):
        with pytest.raises(ConfigurationError, match="expected a URL") as refused:
            CounterEnv(url)
        assert "hush" not in str(refused.value)


def test_urls() -> None:
    assert websocket_url("http://h:1") == "ws://h:1/ws"
    assert websocket_url("https://h/base/") == "wss://h/base/ws"
    assert websocket_url("ws://h:1/ws") == "ws://h:1/ws"
    for bad in ("h:1", "ftp://h", "http://", "http://:1", "http://[::1"):
        with pytest.raises(ConfigurationError, match="expected a URL"):
            websocket_url(bad)
    with pytest.raises(ConfigurationError, match="got neither"):
        CounterEnv()
    with pytest.raises(ConfigurationError, match="expected an app"):
        GenericEnvClient.from_process()
