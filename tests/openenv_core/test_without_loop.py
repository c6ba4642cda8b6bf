"""A client without `sync()` where no event loop runs: its methods wait, as those of the released client."""

import asyncio
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from counter import Add
from counter_client import CounterEnv
from serve_process import SUPPORT, eventually
from serving import serving
from tally import Tally

from openenv_core import (
    ClientClosedError,
    ConfigurationError,
    GenericEnvClient,
    MCPToolClient,
    StepResult,
    SyncEnvClient,
)
from openenv_core.tools import ToolAction, ToolObservation
from servers import create_app


class Plain(CounterEnv):
    """A released subclass: a method without `async`, and one of its own."""

    def reset(self, start: int = 0, **options: Any) -> Any:
        return super().reset(start=start, **options)

    async def twice(self) -> int:
        await self.reset(seed=1)
        return (await self.step(Add(amount=1))).observation.total


class Overridden(CounterEnv):
    async def reset(self, **options: Any) -> StepResult[Any]:
        """Override with a coroutine function."""
        result = await super().reset(**options)
        result.metadata = {"seen": True}
        return result


def test_episode_by_with(counter_url: str) -> None:
    env: Any = CounterEnv(counter_url)
    with env as entered:
        assert entered is env
        assert env.connected
        assert env.reset(seed=3).observation.total == 3
        assert env.step(Add(amount=1)).reward == 1
        assert env.state().total == 4
        with env.new_session() as child:
            assert child.reset(seed=7).observation.total == 7
        assert env.state().total == 4
        env.disconnect()
        assert not env.connected
        assert env.reset(seed=1).observation.total == 1
    env.close()
    with pytest.raises(ClientClosedError):
        env.reset()


def test_overridden_methods_wait_too(counter_url: str) -> None:
    plain: Any = Plain(counter_url)
    with plain:
        assert plain.reset(start=9, seed=0).observation.total == 9
        with plain.sync() as wrapped:  # of the same client, which is in use
            assert isinstance(wrapped, SyncEnvClient)
            assert wrapped.twice() == 2
    overridden: Any = Overridden(counter_url)
    with overridden:
        assert overridden.reset(seed=1).metadata == {"seen": True}


async def test_client_of_no_loop_is_refused_where_one_runs(counter_url: str) -> None:
    env: Any = CounterEnv(counter_url)
    await asyncio.to_thread(env.reset)
    with pytest.raises(ConfigurationError, match="first called where no loop runs"):
        await env.reset()
    await asyncio.to_thread(env.close)
    other: Any = CounterEnv(counter_url)
    async with other:
        with pytest.raises(ConfigurationError, match="got a second loop"):
            await asyncio.to_thread(other.reset)
        assert (await other.reset(seed=2)).observation.total == 2


async def test_forgotten_await_is_named(counter_url: str) -> None:
    env: Any = CounterEnv(counter_url)
    result = env.reset(seed=1)
    for name in ("observation", "reward", "done"):
        with pytest.raises(
            AttributeError, match=rf"has \.{name}, got a coroutine.*as in a notebook; `await` the call"
        ):
            getattr(result, name)
    assert (await result).observation.total == 1
    with pytest.raises(TypeError, match=r"expected `async with`.*\.sync\(\)"), env:
        pass
    await env.close()
    first: Any = CounterEnv(counter_url)
    second: Any = CounterEnv(counter_url)
    third = CounterEnv(counter_url)
    task = asyncio.create_task(first.reset(seed=1))  # as any coroutine
    totals = await asyncio.gather(task, asyncio.wait_for(second.reset(seed=2), 30), third.sync())
    assert [each.observation.total for each in totals[:2]] == [1, 2]
    for client in (first, second, third):
        await client.close()


def test_threads_share_a_client(counter_url: str) -> None:
    env: Any = GenericEnvClient(counter_url)
    start = threading.Barrier(4)

    def play(seed: int) -> int:
        start.wait(30)
        return int(env.reset(seed=seed).observation["total"])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(play, range(4))) == [0, 1, 2, 3]
    env.close()


async def test_tools_are_called_without_a_loop() -> None:
    def play(url: str) -> None:
        env: Any = MCPToolClient(url)
        with env:
            env.reset()
            assert env.call_tool("add", amount=2) == 2
            assert env.has_tool(env.list_tools()[0].name)

    async with serving(create_app(Tally, ToolAction, ToolObservation)) as address:
        await asyncio.to_thread(play, f"http://{address}")


@pytest.mark.slow
def test_dropped_clients_close_their_connections_and_servers(counter_url: str) -> None:
    gc.collect()
    before = len(psutil.Process().net_connections())
    for _ in range(3):
        env: Any = CounterEnv(counter_url)
        env.reset()
    child = env.new_session()
    del env
    gc.collect()
    assert child.reset(seed=1).observation.total == 1  # its parent lives as long
    del child
    gc.collect()
    eventually(lambda: len(psutil.Process().net_connections()) <= before)
    served: Any = CounterEnv.from_process(cwd=SUPPORT).async_client
    with served:
        process = served._session.servers.provider
        assert process.alive
    assert not process.alive


FORKS = """
import os, sys
from openenv_core import GenericEnvClient
env = GenericEnvClient(sys.argv[1])
with env:
    env.reset()
    if (pid := os.fork()) == 0:
        env.close()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    print(env.reset(seed=5).observation['total'])
forgotten = GenericEnvClient(sys.argv[1])
forgotten.reset()
"""


def test_program_that_forks_and_forgets_leaves_no_errors(counter_url: str) -> None:
    command = [sys.executable, "-W", "error", "-c", FORKS, counter_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")
