"""The asynchronous client: episodes, the order of replies, timeouts, refusals, providers."""

import asyncio
import gc
import json
import os
import signal
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil
import pytest
from counter import Add, Count, Counter, CountState, SlowAsync, cut_off_app
from counter_client import CounterEnv
from scripted import scripted
from serve_process import SUPPORT
from serving import eventually, open_session, serving
from socket_servers import frame, silent_server
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request

from openenv_core import (
    Action,
    CapacityError,
    ClientClosedError,
    ConfigurationError,
    ConnectionFailedError,
    ConnectionLostError,
    ContainerOptions,
    EnvClient,
    ExecutionError,
    GenericEnvClient,
    LocalProcessProvider,
    ProtocolError,
    ProviderError,
    RequestTimeoutError,
    ServerError,
    SessionError,
    StepResult,
    ToolCallError,
)
from openenv_core.client.conversation import MAX_PENDING
from openenv_core.client.session import Closed
from openenv_core.compat import NotProvidedError
from openenv_core.protocol.http import redact_url, websocket_url
from servers import create_app

# Episodes


async def test_episode_with_models() -> None:
    async with (
        serving(create_app(Counter, Add, Count)) as address,
        CounterEnv(base_url=f"http://{address}/") as env,
    ):
        assert env.base_url == env._base_url == f"http://{address}"
        first = await env.reset(seed=3, episode_id="e")
        assert first == StepResult(Count(total=3), None, False, None)
        with pytest.raises(TypeError, match="expected Add"):
            await env.step(Action())  # type: ignore[arg-type]
        then = await env.step(Add(amount=7))
        assert then == StepResult(Count(total=10, reward=1, done=True), 1, True, None)
        state = await env.state()
        assert isinstance(state, CountState)
        assert (state.episode_id, state.total) == ("e", 10)
        with pytest.raises(ExecutionError, match=r"call reset\(\)") as failed:
            await env.step(Add(amount=1))
        assert failed.value.code == "EXECUTION_ERROR"
        assert (await env.reset(seed=0)).observation.total == 0


async def test_released_subclass_keeps_its_hooks_and_constructor() -> None:
    class Released(EnvClient[Add, int, str]):
        def __init__(self, base_url: str, message_timeout_s: float = 7.0) -> None:
            super().__init__(base_url, message_timeout_s=message_timeout_s)
            self.log: list[str] = []

        def _step_payload(self, action: Add) -> dict[str, Any]:
            return {"amount": action.amount}

        def _parse_result(self, payload: dict[str, Any]) -> StepResult[int]:
            return StepResult(
                payload["observation"]["total"], payload.get("reward"), payload.get("done", False)
            )

        def _parse_state(self, payload: dict[str, Any]) -> str:
            return str(payload["episode_id"])

    async with (
        serving(create_app(Counter, Add, Count, max_concurrent_envs=2)) as address,
        Released(f"http://{address}") as env,
        await env.new_session() as child,
    ):
        await env.reset(seed=0, episode_id="e")
        assert await env.step(Add(amount=2)) == StepResult(2, 1, False)
        assert await env.state() == "e"
        assert isinstance(child, Released)
        assert child.log is not env.log
        assert child._session.settings.message_timeout_s == 7.0


# What callers of the released client do


def test_errors_subclass_what_released_callers_catch() -> None:
    for ours, caught in (
        (ConnectionFailedError, ConnectionError),
        (ConnectionLostError, ConnectionError),
        (RequestTimeoutError, TimeoutError),
        (ServerError, RuntimeError),
        (ToolCallError, RuntimeError),
        (ProviderError, RuntimeError),
        (ConfigurationError, ValueError),
        (NotProvidedError, ModuleNotFoundError),
    ):
        assert issubclass(ours, caught)


# The order of replies


async def test_timeout_keeps_the_session_and_shifts_no_reply() -> None:
    proceed = asyncio.Event()

    async def handler(ws: ServerConnection) -> None:
        number = 0
        async for _ in ws:
            number += 1
            if number == 2:
                await proceed.wait()
            await ws.send(frame(number))

    async with scripted(handler) as url, CounterEnv(url, message_timeout_s=None) as env:
        await env.reset()
        conversation: Any = env._session.conversation
        conversation._timeout_s = 0.2  # only of those that are not answered
        with pytest.raises(RequestTimeoutError, match=r"within 0.2 s.*lives on"):
            await env.step(Add(amount=1))
        with pytest.raises(RequestTimeoutError):  # it waits for the one before
            await env.step(Add(amount=1))
        assert env.connected
        conversation._timeout_s = 60
        proceed.set()
        assert (await env.step(Add(amount=1))).observation.total == 4
        assert (await env.reset()).observation.total == 5


@pytest.mark.parametrize("dialect", ["released", "ropewalk.v1"])
async def test_reset_leaves_a_server_that_answers_nothing_for_a_new_session(dialect: str) -> None:
    sessions = 0

    async def handler(ws: ServerConnection) -> None:
        nonlocal sessions
        sessions += 1
        is_first = sessions == 1
        async for text in ws:
            request = json.loads(text)
            if request.get("op") == "open":
                await ws.send(json.dumps({"id": request["id"], "members": [0], "last": True}))
            elif not is_first:
                await ws.send(json.dumps({**json.loads(frame(7)), "id": request.get("id")}))

    options: dict[str, Any] = {} if dialect == "released" else {"subprotocols": [dialect]}
    async with scripted(handler, **options) as url, CounterEnv(url, message_timeout_s=0.005) as env:
        for _ in range(MAX_PENDING + 6):
            with pytest.raises(RequestTimeoutError):
                await env.step(Add(amount=1))
        with pytest.raises(RequestTimeoutError, match=r"call reset\(\) for a new session"):
            await env.state()
        env._session.settings = replace(env._session.settings, message_timeout_s=20)  # of the next
        assert (await env.reset()).observation.total == (await env.step(Add(amount=1))).observation.total == 7
        assert sessions == 2


async def test_reason_of_a_session_end_is_reported_after_a_timeout() -> None:
    async def handler(ws: ServerConnection) -> None:
        await ws.recv()
        await proceed.wait()
        data = {"message": "took too long", "code": "SESSION_ERROR"}
        await ws.send(json.dumps({"type": "error", "data": data}))

    proceed = asyncio.Event()
    async with scripted(handler) as url, CounterEnv(url, message_timeout_s=0.2) as env:
        with pytest.raises(RequestTimeoutError):
            await env.reset()
        env._session.conversation._timeout_s = 60  # type: ignore[union-attr]
        proceed.set()
        with pytest.raises(SessionError, match="took too long"):
            await env.step(Add(amount=1))
        assert not env.connected


# Refusals and ends


async def reset_when_there_is_room(env: CounterEnv, seed: int) -> int:
    async with asyncio.timeout(30):  # the server has to notice that a session has ended
        while True:
            try:
                return (await env.reset(seed=seed)).observation.total
            except CapacityError:
                await asyncio.sleep(0.01)


async def test_invalid_replies_are_protocol_errors() -> None:
    unread = '{"type":"observation","data":{"observation":{"no":1}}}'
    replies: list[str | bytes] = ["{", "[]", "{}", '{"type":"state","data":{}}', unread, b"\xff"]
    reply: str | bytes = b""

    async def handler(ws: ServerConnection) -> None:
        async for _ in ws:
            await ws.send(reply)

    async with scripted(handler) as url:
        for reply in replies:  # noqa: B007 - read by the server
            async with CounterEnv(url) as env:
                with pytest.raises(ProtocolError, match="expected"):
                    await env.reset()


async def test_request_granted_its_turn_as_the_session_ends_is_not_sent() -> None:
    async with serving(create_app(Counter, Add, Count)) as address:
        env = CounterEnv(f"http://{address}")
        await env.reset(seed=0)
        release = env._session._lock.release

        def release_and_end() -> None:
            release()
            env._session._leave(Closed(for_good=False))  # as a task that closes it, before the next

        env._session._lock.release = release_and_end  # type: ignore[method-assign]
        steps = [asyncio.create_task(env.step(Add(amount=1))) for _ in range(2)]
        assert (await steps[0]).observation.total == 1
        with pytest.raises(ConnectionLostError, match="has closed the session"):
            await steps[1]
        await env.close()


@pytest.mark.parametrize(
    ("transport", "how"), [("websocket", "close"), ("websocket", "disconnect"), ("http", "close")]
)
async def test_closing_ends_a_waiting_request(transport: str, how: str) -> None:
    env_class = SlowAsync.fresh()
    app = create_app(env_class, Add, Count)
    async with serving(app) as address:
        env = CounterEnv(f"http://{address}", transport=transport, message_timeout_s=None)
        await env.reset()
        request = asyncio.create_task(env.step(Add(amount=1)))
        await eventually(env_class.entered.is_set)
        await getattr(env, how)()
        with pytest.raises(ConnectionLostError):
            await request
        assert transport == "websocket" or app.sessions.active == 0
        await env.close()
        await env.close()
        with pytest.raises(ClientClosedError):
            await env.reset()
        await eventually(lambda: app.sessions.active == 0)


@pytest.mark.parametrize("how", ["close", "disconnect"])
async def test_closing_ends_a_request_whose_connection_is_being_made(how: str) -> None:
    asked, admitted = asyncio.Event(), asyncio.Event()

    async def shake_hands(_: ServerConnection, __: Request) -> None:
        asked.set()
        await admitted.wait()

    async with scripted(ServerConnection.wait_closed, process_request=shake_hands) as url:
        env = CounterEnv(url, message_timeout_s=None)
        request = asyncio.create_task(env.reset())
        await asked.wait()
        closing = asyncio.create_task(getattr(env, how)())
        await asyncio.sleep(0)
        admitted.set()
        with pytest.raises(ConnectionLostError, match="has closed the session"):
            await asyncio.wait_for(request, 30)
        await closing
        await env.close()


async def test_disconnect_that_is_cancelled_closes_no_later_session() -> None:
    async with serving(create_app(Counter, Add, Count)) as address, CounterEnv(f"http://{address}") as env:
        await env.reset(seed=1)
        await env._session._lock.acquire()
        leaving = asyncio.create_task(env.disconnect())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        env._session._lock.release()
        with suppress(ConnectionLostError):  # the session was ended nevertheless
            await env.reset(seed=2)
        assert (await env.reset(seed=2)).observation.total == 2


async def test_vector_recv_raises_for_each_deadline_and_the_close() -> None:
    env_class = SlowAsync.fresh()
    async with (
        serving(create_app(env_class, Add, Count, max_concurrent_envs=4)) as address,
        CounterEnv(f"http://{address}", message_timeout_s=None) as env,
    ):
        vector = await env.vector(3)
        for member, timeout_s in enumerate((0.1, 0.2, 600.0)):
            vector._conversation._timeout_s = timeout_s
            await vector.send("step", members=[member], actions=[{"amount": 1}])
        for _ in range(2):
            with pytest.raises(RequestTimeoutError):
                await asyncio.wait_for(vector.recv(), 30)
        last = asyncio.create_task(vector.recv())
        await asyncio.sleep(0)
        await vector.close()
        with pytest.raises(ClientClosedError):
            await asyncio.wait_for(last, 30)


# Event loops


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the first loop's socket
def test_second_event_loop_is_refused_while_the_first_runs(counter_url: str) -> None:
    env = CounterEnv(counter_url)

    async def play() -> None:
        await env.reset(seed=3)
        with pytest.raises(ConfigurationError, match="got a second loop"):
            await asyncio.to_thread(asyncio.run, env.state())
        assert (await env.state()).total == 3
        await env.close()

    asyncio.run(play())
    gc.collect()  # while the warning of the socket is ignored


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the first loop's socket
def test_client_of_a_closed_loop_can_only_be_closed(counter_url: str) -> None:
    env = CounterEnv(counter_url)

    async def reset() -> None:
        await env.reset(seed=1)

    asyncio.run(reset())
    with pytest.raises(ConfigurationError, match=r"got a second loop.*asyncio\.run"):
        asyncio.run(reset())
    asyncio.run(env.__aexit__())
    assert env.closed
    gc.collect()  # while the warning of the socket is ignored


# URLs and modes


def test_secrets_of_a_url_are_redacted() -> None:
    for url, redacted in (
        ("https://me:hush@h:1/base?key=hush#hush", "https://h:1/base"),
        ("ws://h/@me/ws", "ws://h/@me/ws"),
        ("http://hush@h", "http://h"),
        ("http://me:hush@[::1", "...@[::1"),
        ("http://me:hu?sh@h", "...@h"),
        ("http://me:hu/sh@h/x?hush", "...@h/x"),
        ("me:hush@h:1", "...@h:1"),
        ("http://h:80a0?hush", "http://h:80a0"),
        ("blackjack", "blackjack"),
    ):
        assert redact_url(url) == redacted
    assert repr(CounterEnv("http://me:hush@h").sync()) == "<CounterEnv http://h, not connected>.sync()"
    for url in ("ftp://me:hush@h", "me:hush@h:1", "http://me:hush@[::1"):
        with pytest.raises(ConfigurationError, match="expected a URL") as refused:
            CounterEnv(url)
        assert "hush" not in str(refused.value)


def test_urls_are_normalised_and_checked() -> None:
    assert websocket_url("http://h:1") == "ws://h:1/ws"
    assert websocket_url("https://h/base/") == "wss://h/base/ws"
    assert websocket_url("ws://h:1/ws") == "ws://h:1/ws"
    for bad in ("h:1", "ftp://h", "http://", "http://:1", "http://[::1"):
        with pytest.raises(ConfigurationError, match="expected a URL"):
            websocket_url(bad)
    with pytest.raises(ConfigurationError, match="neither base_url nor provider"):
        CounterEnv()
    with pytest.raises(ConfigurationError, match="expected an app"):
        GenericEnvClient.from_process()


def test_mode_comes_from_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENENV_CLIENT_MODE", raising=False)
    assert GenericEnvClient("http://h")._mode == "simulation"
    assert GenericEnvClient("http://h", mode="Production")._mode == "production"
    monkeypatch.setenv("OPENENV_CLIENT_MODE", "production")
    assert GenericEnvClient("http://h")._mode == "production"
    assert GenericEnvClient("http://h", mode="simulation")._mode == "simulation"
    monkeypatch.setenv("OPENENV_CLIENT_MODE", "play")
    with pytest.raises(ConfigurationError, match="OPENENV_CLIENT_MODE"):
        GenericEnvClient("http://h")


# More sessions, standing sessions, providers


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_more_sessions_of_one_client(transport: str) -> None:
    app = create_app(Counter, Add, Count, max_concurrent_envs=2)
    async with serving(app) as address:
        async with CounterEnv(f"http://{address}", transport=transport, queue_timeout_s=0) as parent:
            await parent.reset(seed=1)
            child = await parent.new_session()
            assert type(child) is CounterEnv
            assert (await child.reset(seed=5)).observation.total == 5
            assert (await parent.state()).total == 1
            with pytest.raises(CapacityError):
                await (await parent.new_session()).reset()
        with pytest.raises(ClientClosedError):
            await child.reset()
        await eventually(lambda: app.sessions.active == 0)


async def test_client_closed_while_it_opens_a_session() -> None:
    async with silent_server(shakes_hands=False) as url:
        env = CounterEnv(url, connect_timeout_s=0.3)
        making = asyncio.create_task(env.new_session())
        await eventually(lambda: env._session.children)
        await env.close()
        with pytest.raises(ConnectionFailedError, match="no answer within"):
            await making


async def test_attached_client_leaves_its_session_standing() -> None:
    app = create_app(Counter, Add, Count)
    async with serving(app) as address:
        session_id = await open_session(address)
        async with CounterEnv(f"http://{address}", session_id=session_id) as env:
            await env.reset(seed=3)
        async with CounterEnv(f"http://{address}", session_id=session_id, transport="http") as env:
            assert (await env.state()).total == 3
        assert app.sessions.active == 1  # it is not the client's to end


class Runtime:
    """A provider with the released interface: start, wait, stop."""

    def __init__(self, url: str, *, fails: bool = False) -> None:
        self.url, self.fails, self.calls = url, fails, list[str]()

    def start(self, port: int | None = None, **options: Any) -> str:
        self.calls.append("start")
        return self.url

    def wait_for_ready(self, timeout_s: float = 60.0) -> None:
        self.calls.append("wait")

    def stop(self) -> None:
        self.calls.append("stop")
        if self.fails:
            raise RuntimeError("cannot schedule new futures after shutdown")  # in the words of an executor


class Container:
    """A provider with the other released interface."""

    def __init__(self, url: str, *, fails: bool = False) -> None:
        self.url, self.fails, self.calls = url, fails, list[str]()

    def start_container(self, image: str | None = None, **options: Any) -> str:
        self.calls.append("start")
        return self.url

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        self.calls.append(base_url)
        if self.fails:
            raise TimeoutError("not ready")

    def stop_container(self) -> None:
        self.calls.append("stop")


class Wanting(Container):
    def start_container(self, image: str, **options: Any) -> str:  # type: ignore[override]
        raise AssertionError


async def test_providers_of_both_released_interfaces_work() -> None:
    async with serving(create_app(Counter, Add, Count)) as address:
        url = f"http://{address}"
        for provider, calls in ((Runtime(url), ["start", "wait"]), (Container(url), ["start", url])):
            async with CounterEnv(provider=provider) as env:
                assert await reset_when_there_is_room(env, seed=2) == 2
                await env.disconnect()
                assert env.base_url == url
            assert provider.calls == [*calls, "stop"]
        late = Container(url, fails=True)
        with pytest.raises(TimeoutError, match="not ready"):
            await CounterEnv(provider=late).connect()
        assert late.calls == ["start", url, "stop"]
    with pytest.raises(ConfigurationError, match=r"start_container\(\) to need no arguments, got: .*'image'"):
        CounterEnv(provider=Wanting("http://h"))
    wanting = Wanting("http://h")
    await CounterEnv("http://h", provider=wanting).close()  # it has been started with what it wants
    refusing = Runtime("http://h", fails=True)
    with pytest.raises(RuntimeError, match="after shutdown"):
        await CounterEnv(provider=refusing).close()
    assert wanting.calls == refusing.calls == ["stop"]  # once, although it failed


@pytest.mark.slow
def test_end_of_the_server_process_is_reported() -> None:
    provider = LocalProcessProvider("counter:app", cwd=SUPPORT)
    assert (provider.alive, provider.output()) == (False, "")
    with CounterEnv(provider=provider).sync() as env:
        env.reset()
        assert provider.alive
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.ZombieProcess):  # another test's, which nobody has waited for yet
                if "serve" in process.cmdline() and "guard.py" not in " ".join(process.cmdline()):
                    os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ConnectionLostError, match="the server's process has ended"):
            env.step(Add(amount=1))
        assert not provider.alive
        with pytest.raises(ConnectionFailedError, match="the server's process has ended"):
            env.reset()


async def test_client_hook_without_metadata_still_gets_how_the_episode_ended() -> None:
    class Released(GenericEnvClient):
        def _parse_result(self, payload: dict[str, Any]) -> StepResult[Any]:
            fields = {name: value for name, value in payload["observation"].items() if name != "metadata"}
            return StepResult(fields, payload["reward"], payload["done"])

    async with serving(cut_off_app) as address, Released(f"http://{address}") as client:
        await client.reset()
        last = await client.step({"amount": 1})
    assert (last.terminated, last.truncated, last.infrastructure_error) == (False, True, "no disk")


def test_arguments_by_any_name_are_not_the_clients_own() -> None:
    class Open(CounterEnv):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)

    # `options` are those of the container, although the constructor has a parameter of that name.
    Open.from_docker_image("some:image", options=ContainerOptions(memory="64m")).close()
    provider = Container("http://h")
    CounterEnv.from_docker_image("some:image", provider).close()  # by position, as in the released package
    assert set(provider.calls) == {"stop"}
