"""Servers of a run, really killed: detected, restarted, announced, and ended with the run."""

import asyncio
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from process_fleet import ProcessFleet
from serving import eventually as until
from slow_server import SlowClient, Wait

from openenv_core import ServerStartError
from openenv_core.errors import ExecutionError, ProviderError
from openenv_core.providers.fleet import FleetServer
from rl_bridge.environments import servers as supervised
from rl_bridge.environments.servers import EnvironmentServers, SupervisedServer, run_servers
from rl_bridge.errors import RoleError
from rl_bridge.services.restarts import ReplicaState, RestartPolicy

pytestmark = pytest.mark.usefixtures("importable_modules")

HANG_S = 60.0
"""A bound for what would hang otherwise; none is meant to come near it."""
APP = "slow_server:app"
AT_ONCE = RestartPolicy(backoff_s=0.0)


def server_behind(guard: int | None) -> int:
    """The process of a server whose guard is known."""
    return int(psutil.Process(guard).children()[0].pid)


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@asynccontextmanager
async def none_left() -> AsyncIterator[None]:
    before = descendants()
    yield
    await until(lambda: not descendants() - before)


class Listener:
    """Who is told of the servers."""

    def __init__(self) -> None:
        self.lists: list[tuple[str, ...]] = []

    async def __call__(self, urls: tuple[str, ...]) -> None:
        self.lists.append(urls)


async def step(url: str) -> int:
    async with SlowClient(url) as client:
        await client.reset()
        return int((await client.step(Wait())).observation.pid)


@pytest.mark.slow
async def test_servers_keep_a_log_each_and_tell_where_one_raised(tmp_path: Path) -> None:
    async with none_left(), EnvironmentServers(app=APP, count=2, logs=tmp_path) as servers:
        assert await servers.traceback() == ""
        async with SlowClient(servers.urls[1]) as client:
            await client.reset()
            with pytest.raises(ExecutionError):
                await client.step(Wait(seconds=-1.0))
        async with asyncio.timeout(HANG_S):
            while not (traceback := await servers.traceback()):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.01)
    first, *_, line, error = traceback.splitlines()
    assert first == "Traceback (most recent call last):"
    assert error == "RuntimeError: time does not run backwards"
    assert "time does not run backwards" in line
    assert "RuntimeError" not in (tmp_path / "environment-0.log").read_text()
    assert traceback in (tmp_path / "environment-1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim",
    ["server", pytest.param("guard", marks=pytest.mark.soak), pytest.param("silent", marks=pytest.mark.soak)],
)
async def test_lost_server_is_restarted_and_announced(victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if victim == "silent":
        monkeypatch.setattr(supervised, "PROBE_INTERVAL_S", 1.0)
        monkeypatch.setattr(supervised, "SILENCE_LIMIT_S", 4.0)
    listener = Listener()
    async with (
        none_left(),
        EnvironmentServers(app=APP, count=2, on_change=listener, restarts=AT_ONCE) as servers,
    ):
        first, second = servers.urls
        await until(lambda: listener.lists == [(first, second)])
        guard = servers.started[0].pid
        assert await step(first) == server_behind(guard)
        if victim == "silent":
            os.kill(server_behind(guard), signal.SIGSTOP)
        else:
            os.kill(guard if victim == "guard" else server_behind(guard), signal.SIGKILL)  # type: ignore[arg-type]
        await until(lambda: servers.started[0].state is not ReplicaState.SERVING)
        # The other one serves on, and who is told at this moment hears of it alone.
        assert servers.urls == (second,)
        assert await step(second) == server_behind(servers.started[1].pid)
        await until(lambda: servers.started[0].state is ReplicaState.SERVING)
        third, same = servers.urls
        assert same == second
        assert third != first
        assert await step(third) == server_behind(servers.started[0].pid)
        assert [server.restarts for server in servers.started] == [1, 0]
        await until(lambda: listener.lists == [(first, second), (second,), (third, second)])


async def test_exhausted_restart_budget_ends_the_run_with_the_servers_output() -> None:
    urls: list[str | None] = []
    # A server that dies as soon as somebody looks, and at times cannot even be started.
    starts = iter(["http://server:1", "http://server:2", None, "http://server:3"])
    stops = itertools.count()

    def start() -> str:
        if (url := next(starts)) is None:
            raise ServerStartError("it cannot be started")
        return url

    provider = SimpleNamespace(
        start=start, stop=lambda: next(stops), output=lambda: "the last words", alive=False
    )
    with ThreadPoolExecutor(3) as threads:
        restarts = RestartPolicy(budget=3, backoff_s=0.0)
        server = SupervisedServer("mortal", provider, threads, restarts, lambda: urls.append(server.url))
        await server.start()
        async with asyncio.timeout(HANG_S):
            with pytest.raises(
                RoleError, match=r"mortal to need at most 3 restarts .* it ended\nthe last words"
            ):
                await server.supervise()
        assert urls == ["http://server:1", None, "http://server:2", None, "http://server:3", None]
        assert server.state is ReplicaState.FAILED
        assert server.restarts == next(stops) == 3


@pytest.mark.slow
async def test_failed_or_cancelled_start_leaves_nothing_running() -> None:
    async with none_left():
        before = descendants()
        starting = asyncio.ensure_future(EnvironmentServers(app="never_ready:app", count=2).__aenter__())
        await until(lambda: len(descendants() - before) >= 2)
        starting.cancel()
        async with asyncio.timeout(HANG_S):
            with pytest.raises(asyncio.CancelledError):
                await starting


async def test_stop_waits_for_a_start_that_has_hardly_begun() -> None:
    running, stopped = threading.Event(), threading.Event()

    def start() -> str:
        """Takes a while until a stop has an effect on it."""
        running.set()
        time.sleep(0.05)
        stopped.clear()
        ended = stopped.wait(HANG_S)
        running.clear()
        raise ProviderError("it was stopped" if ended else "nobody stopped it")

    provider = SimpleNamespace(start=start, stop=stopped.set, output=str, alive=True)
    with ThreadPoolExecutor(3) as threads:
        server = SupervisedServer("late", provider, threads, AT_ONCE, lambda: None)
        starting = asyncio.ensure_future(server.start())
        await until(running.is_set)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        async with asyncio.timeout(HANG_S):
            await server.stop()
        assert not running.is_set()


@pytest.mark.slow
async def test_servers_of_a_fleet_are_announced_as_they_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "FLEET_POLL_INTERVAL_S", 0.05)
    listener, fleet = Listener(), ProcessFleet("blackjack", 1)
    async with none_left(), EnvironmentServers(fleet=fleet, on_change=listener) as servers:
        await until(lambda: listener.lists == [(fleet.urls()[0],)])
        await asyncio.to_thread(fleet.scale, 2)
        await until(lambda: set(listener.lists[-1]) == set(fleet.urls()))
        assert set(servers.urls) == set(fleet.urls())
        assert len(servers.urls) == 2


async def test_fleet_that_cannot_be_stopped_hides_no_error() -> None:
    class Unreachable(ProcessFleet):
        def servers(self) -> list[FleetServer]:
            raise ProviderError("the engine does not answer")

        def _end(self) -> None:
            raise ProviderError("it cannot be stopped")

    with pytest.raises(ProviderError, match="the engine does not answer"):
        async with EnvironmentServers(fleet=Unreachable("blackjack", 1)):
            pass


async def test_external_servers_are_announced_and_never_touched() -> None:
    listener = Listener()
    async with EnvironmentServers(urls=["http://one:8000", "http://two:8000"], on_change=listener) as servers:
        assert servers.urls == ("http://one:8000", "http://two:8000")
        assert servers.started == []
        await until(lambda: listener.lists == [servers.urls])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await servers.watch()


async def test_several_environments_start_and_end_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    both_start, both_stop = threading.Barrier(2, timeout=HANG_S), threading.Barrier(2, timeout=HANG_S)

    class PairedProvider:
        """Its start and stop wait for those of another."""

        alive = True

        def __init__(self, app: str, log: Path | None = None) -> None:
            self.stop = functools.cache(both_stop.wait)

        def start(self) -> str:
            both_start.wait()
            return "http://127.0.0.1:9"

    monkeypatch.setattr(supervised, "LocalProcessProvider", PairedProvider)
    both = [EnvironmentServers(app="one"), EnvironmentServers(app="another")]
    async with run_servers(both):
        assert [one.urls for one in both] == [("http://127.0.0.1:9",)] * 2
    assert [one.started[0].state for one in both] == [ReplicaState.STOPPED] * 2


async def test_where_one_environment_cannot_start_none_is_left() -> None:
    async with none_left():
        with pytest.raises(ServerStartError, match="no_such_module"):
            async with run_servers(
                [EnvironmentServers(app=APP), EnvironmentServers(app="no_such_module:app")]
            ):
                raise AssertionError("one of them cannot be started")
