"""The synchronous client: its thread, Ctrl-C, forks, dropped clients."""

import asyncio
import contextlib
import gc
import re
import socket
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from counter_client import CounterEnv
from serve_process import SUPPORT, eventually

import openenv_core.loop_thread as loop_thread
from openenv_core import (
    ClientClosedError,
    ConfigurationError,
    ConnectionFailedError,
    ProviderError,
    SyncEnvClient,
    ValidationFailedError,
)
from openenv_core.client.session import Closed

HERE = Path(__file__).parent


class DoublingEnv(CounterEnv):
    async def double_reset(self) -> int:
        """Add a method of the subclass's own."""
        await self.reset(seed=1)
        return (await self.reset(seed=2)).observation.total


async def test_awaiting_gives_the_async_client_whose_server_ends_with_it() -> None:
    starting = CounterEnv.from_process(cwd=SUPPORT)
    assert isinstance(starting, SyncEnvClient)
    async with starting as env:
        assert isinstance(env, CounterEnv)
        assert (await env.reset(seed=2)).observation.total == 2
        again = await CounterEnv(env.base_url).sync()
        assert isinstance(again, CounterEnv)
        await again.close()
    with pytest.raises(ConnectionFailedError):
        await CounterEnv(env.base_url).connect()


def test_starts_that_take_long_keep_no_other_client_from_connecting_or_stopping(counter_url: str) -> None:
    release = threading.Event()
    waiting = threading.Semaphore(0)

    class SlowProvider:
        def start(self) -> str:
            waiting.release()
            release.wait(300)
            raise ProviderError("stopped")

        def stop(self) -> None:
            release.set()

    clients = [CounterEnv(provider=SlowProvider()).sync() for _ in range(loop_thread.MAX_HELPERS)]
    with ThreadPoolExecutor(len(clients)) as pool:
        starts = [pool.submit(client.connect) for client in clients]
        try:
            for _ in clients:
                assert waiting.acquire(timeout=60)
            by_name = counter_url.replace("127.0.0.1", "localhost")
            with CounterEnv(by_name, connect_timeout_s=30).sync() as env:
                assert env.reset(seed=2).observation.total == 2
            clients[0].close()
            assert release.is_set()
        finally:
            release.set()
        for start in starts:
            assert isinstance(start.exception(60), ClientClosedError | ProviderError)


def test_errors_and_extra_methods_pass_through(counter_url: str) -> None:
    with DoublingEnv(counter_url).sync() as env:
        with pytest.raises(ValidationFailedError) as raised:
            env.step({"amount": "x"})  # type: ignore[arg-type]
        # The caller's line, `step`, and what raises.
        assert [entry.frame.code.raw.co_name for entry in raised.traceback][1:] == ["step", "_run"]
        assert env.double_reset() == 2
        assert env.connected is True
        assert env.sync() is env
        with pytest.raises(AttributeError):
            env.tripple_reset()
        with pytest.raises(AttributeError):
            env._private  # noqa: B018


def test_lost_server_is_reported_without_the_frames_of_the_thread() -> None:
    """As a trainer prints it that calls an adapter."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        client = CounterEnv(f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(ConnectionFailedError) as raised:
            loop_thread.shared_loop().run(client.connect)
    assert isinstance(raised.value.__cause__, ConnectionRefusedError)
    text = "".join(traceback.format_exception(raised.value))
    assert {Path(name).name for name in re.findall(r'File "(.*?)"', text)} == {
        "test_sync_client.py",
        "loop_thread.py",
    }


async def test_sync_or_async_is_chosen_before_use(counter_url: str) -> None:
    async with CounterEnv(counter_url) as env:
        with pytest.raises(ConfigurationError, match=r"sync\(\) comes too late"):
            env.sync()
    used = CounterEnv(counter_url).sync()
    await asyncio.to_thread(used.reset)
    with pytest.raises(ConfigurationError, match="await comes too late"):
        await used
    await asyncio.to_thread(used.close)


def test_sessions_outlive_a_dropped_parent_but_not_its_close(counter_url: str) -> None:
    child = CounterEnv(counter_url).sync().new_session()
    gc.collect()
    assert child.reset(seed=1).observation.total == 1
    other = child._client._parent.sync().new_session()  # type: ignore[union-attr]
    other.reset(seed=4)
    other.close()
    other.close()
    assert child.state().total == 1
    child._client._parent.sync().close()
    child.close()
    with pytest.raises(ClientClosedError):
        child.reset()


# Programs of their own: what interrupts itself, forks or just ends


def run_program(*arguments: str) -> tuple[int, str, str]:
    # Not -X dev: asyncio would tell of each turn of the loop that a loaded machine made slow.
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("how", "result"), [("waiting", "interrupted, then 3"), ("often", "100 interrupted, wrong [], then 5")]
)
def test_ctrl_c_at_any_time_keeps_the_order_of_replies(how: str, result: str, counter_url: str) -> None:
    assert run_program(str(HERE / "interrupted_client.py"), counter_url, how) == (0, f"{result}\n", "")


FORKS = """
import os, sys
from openenv_core import ClientClosedError, GenericEnvClient
env = GenericEnvClient(sys.argv[1]).sync()
env.reset()
if (pid := os.fork()) == 0:
    try:
        env.reset()
    except ClientClosedError:
        env.close()
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
print(env.reset(seed=5).observation['total'])
env.close()
"""
FORGETS = """
import sys
from openenv_core import GenericEnvClient
env = GenericEnvClient(sys.argv[1]).sync()
env.reset()
"""
CLOSES_AT_ITS_EXIT = """
import atexit, sys
from openenv_core import GenericEnvClient
class Given:
    def start(self): return sys.argv[1]
    def stop(self): print('stopped')
env = GenericEnvClient(provider=Given()).sync()
env.reset()
atexit.register(env.close)
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [(FORKS, "5\n"), (FORGETS, ""), (CLOSES_AT_ITS_EXIT, "stopped\n")],
    ids=["forks", "forgets", "closes at its exit"],
)
def test_program_that_forks_or_exits_leaves_no_errors(program: str, expected: str, counter_url: str) -> None:
    assert run_program("-c", program, counter_url) == (0, expected, "")


# The thread


def test_end_of_the_background_thread_is_detected(counter_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "LIVENESS_CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(loop_thread, "_shared", None)  # not that of other tests
    env = CounterEnv(counter_url).sync()
    env.reset()
    thread = env._client._thread

    async def end_the_loop() -> None:
        env._client._session.conversation.carrier.abort()
        await asyncio.sleep(0.05)
        thread._end.set()
        await asyncio.sleep(3600)

    with pytest.raises(ClientClosedError, match="before the reply came"):
        env._client._run(end_the_loop)
    with pytest.raises(ClientClosedError, match="background thread has ended"):
        env.reset()
    with CounterEnv(counter_url).sync() as another:
        assert another.reset(seed=3).observation.total == 3


def test_timeout_error_of_the_coroutine_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "LIVENESS_CHECK_INTERVAL_S", 0.01)
    thread = loop_thread.LoopThread()

    async def late() -> None:
        await asyncio.sleep(0.1)
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        thread.run(late)
    thread.stop()
    thread.stop()


def test_thread_stops_when_no_other_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python 3.12 says

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "shutdown_default_executor", refuse)
    thread = loop_thread.LoopThread()
    thread.run(asyncio.sleep, 0)
    thread.stop()
    assert not thread._thread.is_alive()


def test_call_during_the_end_of_the_thread_is_refused() -> None:
    thread = loop_thread.LoopThread()
    thread.run(asyncio.sleep, 0)
    ending, loop = threading.Event(), thread._loop
    assert loop is not None
    refused = threading.Event()

    async def slow_to_go() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ending.set()
            await asyncio.to_thread(refused.wait, 30)  # the loop is being taken down meanwhile

    loop.call_soon_threadsafe(lambda: asyncio.ensure_future(slow_to_go()))
    thread.run(asyncio.sleep, 0.01)
    stopper = threading.Thread(target=thread.stop)
    stopper.start()
    assert ending.wait(30)
    thread_call = loop_thread._ThreadCall(asyncio.sleep, 0)
    loop.call_soon_threadsafe(thread._start_call, thread_call)  # by a caller who had looked before
    assert thread_call.wait(30)
    refused.set()
    with pytest.raises(ClientClosedError, match="before the reply came"):
        thread_call.outcome()
    stopper.join()


def test_sync_call_inside_the_client_loop_is_refused(counter_url: str) -> None:
    with CounterEnv(counter_url).sync() as env:

        async def inside() -> None:
            env.reset()

        with pytest.raises(ConfigurationError, match="await the method"):
            env._client._run(inside)
        assert env.reset(seed=2).observation.total == 2


def test_first_use_by_many_threads_is_safe(counter_url: str) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            with contextlib.closing(CounterEnv(counter_url).sync()) as env, ThreadPoolExecutor(6) as pool:
                start = threading.Barrier(6)

                def play(seed: int, env: Any = env, start: threading.Barrier = start) -> int:
                    start.wait(30)
                    return int(env.reset(seed=seed).observation.total)

                assert list(pool.map(play, range(6))) == list(range(6))
    finally:
        sys.setswitchinterval(interval)


def test_exit_while_parsing_a_reply_ends_no_other_client(counter_url: str) -> None:
    class Exits(CounterEnv):
        def _parse_result(self, payload: dict[str, Any]) -> Any:
            raise SystemExit(3)

    with CounterEnv(counter_url).sync() as other, Exits(counter_url).sync() as env:
        with pytest.raises(SystemExit):
            env.reset()
        assert env._client._thread is not None
        assert env._client._thread is other._client._thread  # one for all clients of a process
        assert other.reset(seed=1).observation.total == 1


def test_dropped_session_is_closed_while_its_parent_lives(counter_url: str) -> None:
    with CounterEnv(counter_url).sync() as parent:
        session = parent.new_session()._client._session
        gc.collect()
        eventually(lambda: isinstance(session.state, Closed))
        assert parent.reset(seed=2).observation.total == 2


@pytest.mark.slow
def test_dropped_client_closes_its_connections(counter_url: str) -> None:
    gc.collect()
    before = len(psutil.Process().net_connections())
    for _ in range(5):
        CounterEnv(counter_url).sync().reset()
    gc.collect()
    eventually(lambda: len(psutil.Process().net_connections()) <= before)
