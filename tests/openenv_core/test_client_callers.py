"""The ways in which released code makes and uses a client."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from counter import Add, Count, Counter
from counter_client import CounterEnv
from serving import eventually, rpc, serving
from socket_servers import silent

from openenv_core import (
    CapacityReached,
    ClientClosed,
    ConfigurationError,
    ConnectionFailed,
    ConnectionLost,
    GenericAction,
    GenericEnvClient,
    LocalProcessProvider,
)
from servers import create_app

SUPPORT = str(Path(__file__).parents[1] / "support")


class OwnConstructor(CounterEnv):
    """As released subclasses may have it: few arguments, and something of its own."""

    def __init__(self, base_url: str, message_timeout_s: float = 7.0) -> None:
        super().__init__(base_url, message_timeout_s=message_timeout_s)
        self.log: list[str] = []


def test_an_action_by_its_fields() -> None:
    action = GenericAction(amount=3, metadata={"tag": "t"})
    assert action == {"amount": 3, "metadata": {"tag": "t"}}
    assert repr(action) == "GenericAction(amount=3, metadata={'tag': 't'})"
    with GenericEnvClient.from_process("counter:app", cwd=SUPPORT) as env:
        assert env.reset(seed=1).observation["total"] == 1
        assert env.step(action).observation["total"] == 4


@pytest.mark.slow
def test_bare_use_of_what_a_constructor_returns() -> None:
    env = CounterEnv.from_process(cwd=SUPPORT)
    assert env.reset(seed=1).observation.total == 1
    assert env.step(Add(amount=1)).observation.total == 2
    assert env._base_url == env.base_url
    env.close()
    with CounterEnv.from_process(cwd=SUPPORT).sync() as synced:
        assert synced.reset(seed=1).observation.total == 1

    async def awaited() -> int:
        async with await CounterEnv.from_process(cwd=SUPPORT) as client:
            return (await client.reset(seed=6)).observation.total

    assert asyncio.run(awaited()) == 6


async def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENENV_CLIENT_MODE", raising=False)
    assert GenericEnvClient("http://h")._mode == "simulation"
    assert GenericEnvClient("http://h", mode="Production")._mode == "production"
    monkeypatch.setenv("OPENENV_CLIENT_MODE", "production")
    assert GenericEnvClient("http://h")._mode == "production"
    assert GenericEnvClient("http://h", mode="simulation")._mode == "simulation"
    monkeypatch.setenv("OPENENV_CLIENT_MODE", "play")
    with pytest.raises(ConfigurationError, match="OPENENV_CLIENT_MODE"):
        GenericEnvClient("http://h")


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_more_sessions_of_one_client(transport: str) -> None:
    app = create_app(Counter, Add, Count, max_concurrent_envs=2)
    async with serving(app) as address:
        async with CounterEnv(f"http://{address}/", transport=transport) as parent:
            assert parent._base_url == f"http://{address}"
            await parent.reset(seed=1)
            child = await parent.new_session()
            assert type(child) is CounterEnv
            assert (await child.reset(seed=5)).observation.total == 5
            assert (await parent.state()).total == 1
            with pytest.raises(CapacityReached):
                await (await parent.new_session()).reset()
        with pytest.raises(ClientClosed):
            await child.reset()
        await eventually(lambda: app.sessions.active == 0)


async def test_a_client_that_is_closed_while_it_makes_a_session() -> None:
    over, handler = silent(shakes_hands=False)
    async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        env = CounterEnv(url, connect_timeout_s=0.3)
        making = asyncio.create_task(env.new_session())
        await eventually(lambda: env._others)
        await env.close()
        with pytest.raises(ConnectionFailed, match="no answer within"):
            await making
        over.set()


async def test_more_sessions_of_a_subclass_with_its_own_constructor() -> None:
    async with (
        serving(create_app(Counter, Add, Count, max_concurrent_envs=2)) as address,
        OwnConstructor(f"http://{address}") as parent,
        await parent.new_session() as child,
    ):
        assert isinstance(child, OwnConstructor)
        assert child.log is not parent.log
        assert child._message_timeout_s == 7.0


def test_more_sessions_without_asyncio() -> None:
    with CounterEnv.from_process(cwd=SUPPORT) as parent:
        parent.reset(seed=1)
        child = parent.new_session()
        assert child.reset(seed=4).observation.total == 4
        child.close()
        child.close()
        assert parent.state().total == 1
        forgotten = parent.new_session()
        forgotten.reset()
    with pytest.raises(ClientClosed):
        forgotten.reset()


async def test_attached_to_a_standing_session() -> None:
    app = create_app(Counter, Add, Count)
    async with serving(app) as address:
        session_id = (await rpc(address, "openenv/session/create"))["result"]["session_id"]
        async with CounterEnv(f"http://{address}", session_id=session_id) as env:
            await env.reset(seed=3)
        await asyncio.sleep(0.1)
        assert app.sessions.active == 1  # it is not the client's to end
        async with CounterEnv(f"http://{address}", session_id=session_id, transport="http") as env:
            assert (await env.state()).total == 3
        assert app.sessions.active == 1


class Runtime:
    """A provider of the released shape: start, wait, stop."""

    def __init__(self, url: str) -> None:
        self.url, self.calls = url, list[Any]()

    def start(self, port: int | None = None, **options: Any) -> str:
        self.calls.append("start")
        return self.url

    def wait_for_ready(self, timeout_s: float = 60.0) -> None:
        self.calls.append("wait")

    def stop(self) -> None:
        self.calls.append("stop")


class Container:
    """A provider of the other released shape."""

    def __init__(self, url: str) -> None:
        self.url, self.calls = url, list[Any]()
        self.ready = True

    def start_container(self, image: str | None = None, **options: Any) -> str:
        self.calls.append("start")
        return self.url

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        self.calls.append(base_url)
        if not self.ready:
            raise TimeoutError("not ready")

    def stop_container(self) -> None:
        self.calls.append("stop")


async def test_providers_of_the_released_shapes() -> None:
    async with serving(create_app(Counter, Add, Count)) as address:
        url = f"http://{address}"
        for provider, calls in ((Runtime(url), ["start", "wait"]), (Container(url), ["start", url])):
            async with CounterEnv(provider=provider) as env:
                assert (await env.reset(seed=2)).observation.total == 2
                await env.disconnect()
                assert env.base_url == url
            assert provider.calls == [*calls, "stop"]
        started = Runtime(url)
        async with CounterEnv(url, provider=started):
            pass
        assert started.calls == ["stop"]
        late = Container(url)
        late.ready = False
        with pytest.raises(TimeoutError, match="not ready"):
            await CounterEnv(provider=late).connect()
        assert late.calls == ["start", url, "stop"]

    class Wanting(Container):
        def start_container(self, image: str, **options: Any) -> str:  # type: ignore[override]
            raise AssertionError

    with pytest.raises(ConfigurationError, match=r"start_container\(\) to need no arguments, got image"):
        CounterEnv(provider=Wanting("http://h"))
    wanting = Wanting("http://h")
    await CounterEnv("http://h", provider=wanting).close()  # it has been started with what it wants
    assert wanting.calls == ["stop"]


async def test_a_stop_that_fails_is_not_tried_again() -> None:
    class Refusing(Runtime):
        def stop(self) -> None:
            super().stop()
            raise RuntimeError("cannot schedule new futures after shutdown")  # in the words of an executor

    provider = Refusing("http://h")
    with pytest.raises(RuntimeError, match="after shutdown"):
        await CounterEnv(provider=provider).close()
    assert provider.calls == ["stop"]


def test_what_became_of_the_servers_process() -> None:
    provider = LocalProcessProvider("counter:app", cwd=SUPPORT)
    assert (provider.alive, provider.output()) == (False, "")
    with CounterEnv(provider=provider).sync() as env:
        env.reset()
        assert provider.alive
        port = int(env.base_url.rpartition(":")[2])
        servers = [
            process
            for process in psutil.Process().children(recursive=True)
            if any(c.laddr and c.laddr.port == port for c in process.net_connections()) and process.cmdline()
        ]
        for server in servers:
            if "_guard.py" not in " ".join(server.cmdline()):
                os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ConnectionLost, match="the server's process has ended"):
            env.step(Add(amount=1))
        assert not provider.alive
        with pytest.raises(ConnectionFailed, match="the server's process has ended"):
            env.reset()
