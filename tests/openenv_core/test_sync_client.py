import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from counter import Add
from counter_client import CounterEnv

import openenv_core.client.loop_thread as loop_thread
from openenv_core import (
    ClientClosed,
    ConfigurationError,
    ConnectionFailed,
    GenericEnvClient,
    ServerStartFailed,
    SyncEnvClient,
    ValidationFailed,
)

SUPPORT = str(Path(__file__).parents[1] / "support")


class DoublingEnv(CounterEnv):
    async def double_reset(self) -> int:
        """Add a method of the subclass's own."""
        await self.reset(seed=1)
        return (await self.reset(seed=2)).observation.total


@pytest.fixture(scope="module")
def url() -> Any:
    with CounterEnv.from_process(cwd=SUPPORT) as env:
        yield env.base_url


def test_an_episode_in_a_process_of_its_own() -> None:
    env = CounterEnv.from_process(cwd=SUPPORT)
    assert isinstance(env, SyncEnvClient)
    try:
        assert env.reset(seed=2).observation.total == 2
        assert env._base_url == env.base_url
        assert env.base_url.startswith("http://127.0.0.1:")
        assert env.step(Add(amount=3)).reward == 1
        assert env.state().step_count == 1
    finally:
        env.close()
    with pytest.raises(ConnectionFailed):
        CounterEnv(env._client.base_url).sync().connect()


async def test_awaiting_gives_the_async_client() -> None:
    env = await CounterEnv.from_process(cwd=SUPPORT)
    async with env:
        assert isinstance(env, CounterEnv)
        assert (await env.reset(seed=2)).observation.total == 2
        assert await asyncio.gather(*(env.state() for _ in range(3)))


def test_errors_and_extra_methods_pass_through(url: str) -> None:
    with DoublingEnv(url).sync() as env:
        with pytest.raises(ValidationFailed):
            env.step({"amount": "x"})  # type: ignore[arg-type]
        assert env.double_reset() == 2
        assert env.connected is True
        assert env.sync() is env
        with pytest.raises(AttributeError):
            env.tripple_reset()
        with pytest.raises(AttributeError):
            env._private  # noqa: B018


def test_closing_is_final_and_idempotent(url: str) -> None:
    env = GenericEnvClient(url).sync()
    env.reset()
    env.close()
    env.close()
    with pytest.raises(ClientClosed):
        env.reset()
    assert not [t for t in threading.enumerate() if t is getattr(env._thread, "_thread", None)]
    GenericEnvClient(url).sync().close()


def test_a_server_that_does_not_start() -> None:
    with (
        pytest.raises(ServerStartFailed, match="Could not import module"),
        GenericEnvClient.from_process("no_such:app"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.own_process
def test_ctrl_c_leaves_the_session_in_order(url: str) -> None:
    with CounterEnv(url).sync() as env:
        env.reset(seed=1)
        waiting = threading.Event()

        async def forever() -> None:
            waiting.set()
            await asyncio.sleep(3600)

        def interrupt() -> None:
            waiting.wait(20)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            env._run(forever)
        assert env.reset(seed=3).observation.total == 3


def test_the_death_of_the_background_thread_is_noticed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "LIVENESS_S", 0.05)
    env = CounterEnv(url).sync()
    env.reset()
    thread = env._thread
    assert thread is not None

    async def end_the_loop() -> None:
        assert thread._end is not None
        assert env._client._carrier is not None
        env._client._carrier.abort()
        await asyncio.sleep(0.05)
        thread._end.set()
        await asyncio.sleep(3600)

    with pytest.raises(ClientClosed, match="expected a reply"):
        env._run(end_the_loop)
    with pytest.raises(ClientClosed, match="background thread has ended"):
        env.reset()


def test_a_timeout_of_the_coroutine_is_told_from_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "LIVENESS_S", 0.01)
    thread = loop_thread.LoopThread()

    async def late() -> None:
        await asyncio.sleep(0.1)
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        thread.run(late)
    thread.stop()
    thread.stop()


async def test_faces_are_chosen_before_use(url: str) -> None:
    async with CounterEnv(url) as env:
        with pytest.raises(ConfigurationError, match="before the client connects"):
            env.sync()
    used = CounterEnv(url).sync()
    await asyncio.to_thread(used.reset)
    with pytest.raises(ConfigurationError, match="expected await before"):
        await used
    await asyncio.to_thread(used.close)


def test_the_end_of_a_thread_where_no_other_can_be_started_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python 3.12 says

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "shutdown_default_executor", refuse)
    thread = loop_thread.LoopThread()
    thread.run(asyncio.sleep, 0)
    thread.stop()
    assert not thread._thread.is_alive()


def test_many_threads_each_with_a_client(url: str) -> None:
    totals: list[int] = []

    def play(seed: int) -> None:
        with CounterEnv(url).sync() as env:
            env.reset(seed=seed)
            totals.append(env.step(Add(amount=1)).observation.total)

    threads = [threading.Thread(target=play, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(totals) == list(range(1, 9))


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "openenv-client"]


def test_many_threads_with_one_client_that_nobody_has_used(url: str) -> None:
    interval, before = sys.getswitchinterval(), client_threads()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            with contextlib.closing(CounterEnv(url).sync()) as env, ThreadPoolExecutor(6) as pool:
                start = threading.Barrier(6)

                def play(seed: int, env: Any = env, start: threading.Barrier = start) -> int:
                    start.wait(20)
                    return int(env.reset(seed=seed).observation.total)

                assert list(pool.map(play, range(6))) == list(range(6))
    finally:
        sys.setswitchinterval(interval)
    assert client_threads() == before


def test_a_session_of_a_client_outlives_the_name_of_that_client_but_not_its_close(url: str) -> None:
    child = CounterEnv(url).sync().new_session()
    gc.collect()
    assert child.reset(seed=1).observation.total == 1
    assert child._parent is not None
    child._parent.close()
    child.close()
    with pytest.raises(ClientClosed):
        child.reset()


def test_a_dropped_session_is_given_back_while_its_client_lives_on(url: str) -> None:
    with CounterEnv(url).sync() as parent:
        client = parent.new_session()._client
        gc.collect()
        deadline = time.monotonic() + 20
        while client.connected:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert parent.reset(seed=2).observation.total == 2


def test_a_client_is_not_called_from_inside_of_its_own_loop(url: str) -> None:
    with CounterEnv(url).sync() as env:

        async def inside() -> None:
            env.reset()

        with pytest.raises(ConfigurationError, match="await the async client's method"):
            env._run(inside)
        assert env.reset(seed=2).observation.total == 2


@pytest.mark.slow
@pytest.mark.own_process
def test_ctrl_c_at_any_moment_shifts_no_reply(url: str) -> None:
    over = threading.Event()

    def interrupt() -> None:
        pauses = random.Random(7)
        while not over.wait(pauses.random() * 0.004):
            os.kill(os.getpid(), signal.SIGINT)

    with CounterEnv(url).sync() as env:
        env.connect()
        thread = threading.Thread(target=interrupt)
        interrupted = 0
        try:
            thread.start()
            for number in range(100_000):
                try:
                    assert env.reset(seed=number).observation.total == number
                except KeyboardInterrupt:
                    interrupted += 1
                    if interrupted == 100:
                        break
        finally:
            while not over.is_set():
                with contextlib.suppress(KeyboardInterrupt):
                    over.set()
            while thread.is_alive():
                with contextlib.suppress(KeyboardInterrupt):
                    thread.join()
        assert interrupted == 100
        assert env.reset(seed=5).observation.total == 5


def test_what_comes_while_the_thread_ends_is_refused() -> None:
    thread = loop_thread.LoopThread()
    thread.run(asyncio.sleep, 0)
    ending, loop = threading.Event(), thread._loop
    assert loop is not None

    async def slow_to_go() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ending.set()
            await asyncio.sleep(0.3)  # the loop is being taken down meanwhile

    loop.call_soon_threadsafe(lambda: asyncio.ensure_future(slow_to_go()))
    thread.run(asyncio.sleep, 0.01)
    stopper = threading.Thread(target=thread.stop)
    stopper.start()
    assert ending.wait(20)
    errand = loop_thread._Errand(asyncio.sleep, 0)
    loop.call_soon_threadsafe(thread._begin, errand)  # by a caller who had looked before
    assert errand.wait(20)
    with pytest.raises(ClientClosed, match="closed meanwhile"):
        errand.outcome()
    stopper.join()


def test_a_dropped_client_gives_back_what_it_holds(url: str) -> None:
    def connections() -> int:
        return len(psutil.Process().net_connections())

    gc.collect()
    threads, sockets = threading.active_count(), connections()
    for _ in range(5):
        CounterEnv(url).sync().reset()
    gc.collect()
    deadline = time.monotonic() + 20
    while threading.active_count() > threads or connections() > sockets:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.02)


def test_a_fork_leaves_the_client_to_its_parent(url: str) -> None:
    program = (
        "import os, sys\n"
        "from openenv_core import ClientClosed, GenericEnvClient\n"
        "env = GenericEnvClient(sys.argv[1]).sync()\n"
        "env.reset()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        env.reset()\n"
        "    except ClientClosed:\n"
        "        env.close()\n"
        "        sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "print(env.reset(seed=5).observation['total'])\n"
        "env.close()\n"
    )
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", program, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("5\n", "")


def test_the_end_of_a_program_that_forgets_is_quiet(url: str) -> None:
    program = (
        "import sys\nfrom openenv_core import GenericEnvClient\n"
        "env = GenericEnvClient(sys.argv[1]).sync()\nenv.reset()\n"
    )
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", program, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_client_that_is_closed_at_the_exit_stops_its_provider(url: str) -> None:
    program = (
        "import atexit, sys\nfrom openenv_core import GenericEnvClient\n"
        "class Given:\n"
        "    def start(self): return sys.argv[1]\n"
        "    def stop(self): print('stopped')\n"
        "env = GenericEnvClient(provider=Given()).sync()\nenv.reset()\natexit.register(env.close)\n"
    )
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", program, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")
