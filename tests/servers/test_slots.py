"""Whatever clients do and whenever they disconnect: each environment is closed once and each slot comes back."""

import asyncio
import json
import random
import threading
import time
from typing import Any

import pytest
from counter import Add, Count, Counter, SlowBlocking
from server_apps import app_of, start_step, step
from serving import ask, eventually, serving, socket_to
from websockets.exceptions import ConnectionClosed

from servers.execution import Executor
from servers.sessions import SessionTable
from servers.threads import ThreadCall, ThreadPool

CLIENTS = 60
AT_ONCE = 12


class Counted(Counter):
    """Counts its instances; construction, steps and close take a moment."""

    BLOCKING = True
    built = closed = 0
    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        time.sleep(0.002)
        with self.lock:
            type(self).built += 1

    @classmethod
    def fresh(cls) -> "type[Counted]":
        return type(cls.__name__, (cls,), {"built": 0, "closed": 0})

    def step(self, action: Add) -> Count:
        time.sleep(0.002)
        return Count()

    def close(self) -> Any:
        time.sleep(0.002)
        with self.lock:
            type(self).closed += 1


class CountedAsync(Counted):
    async def step(self, action: Add) -> Count:
        await asyncio.sleep(0.002)
        return Count()

    async def close(self) -> None:
        await asyncio.sleep(0.002)
        type(self).closed += 1


class CountedInline(Counted):
    BLOCKING = False


class CountedMixed(CountedAsync):
    """Plain steps, which block a thread, and an async close."""

    def step(self, action: Add) -> Any:
        time.sleep(0.002)
        return Count()


class CountedSolitary(CountedMixed):
    SUPPORTS_CONCURRENT_SESSIONS = False
    REQUIRES_SINGLE_THREAD_EXECUTOR = True


class CountedCloseRaises(Counted):
    def close(self) -> None:
        super().close()
        raise RuntimeError("on purpose")


@pytest.mark.parametrize(
    "kind",
    [CountedInline, Counted, CountedAsync, CountedMixed, CountedSolitary, CountedCloseRaises],
    ids=lambda kind: kind.__name__,
)
async def test_random_connects_and_disconnects_leave_nothing_behind(kind: type[Counted]) -> None:
    env = kind.fresh()
    chance = random.Random(4)
    cap = AT_ONCE if env.SUPPORTS_CONCURRENT_SESSIONS else 1
    app = app_of(env, cap)
    table = app.sessions
    gate = asyncio.Semaphore(cap + 1)  # some find it full

    async def visit() -> None:
        async with gate, socket_to(address) as ws:
            try:
                for _ in range(chance.randrange(4)):
                    await ws.send('{"type":"step","data":{"amount":1}}')
                    if chance.random() < 0.5:
                        await ws.recv()
                await asyncio.sleep(chance.random() * 0.01)
                if chance.random() < 0.3:
                    await ws.send('{"type":"close"}')
                if chance.random() < 0.5:
                    ws.transport.abort()
            except ConnectionClosed:
                pass

    async with serving(app) as address:
        before = threading.active_count()
        tasks = len(asyncio.all_tasks())
        await asyncio.gather(*(visit() for _ in range(CLIENTS)))
        await eventually(lambda: table.active == table.executor.abandoned == 0)
        await eventually(lambda: env.closed == env.built)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
        assert not table._sessions
        assert env.built > CLIENTS // 20
        await eventually(lambda: threading.active_count() <= before + table.executor.pool.size)


@pytest.mark.parametrize("kind", [CountedInline, Counted, CountedSolitary], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_only_slot_is_free_for_the_next_client_at_once(kind: type[Counted], how: str) -> None:
    env = kind.fresh()
    async with serving(app_of(env, cap=1)) as address:
        for _ in range(25):
            async with socket_to(address) as ws:
                assert (await ask(ws, step()))["type"] == "observation"
                if how == "close":
                    await ws.send('{"type":"close"}')
                ws.transport.abort()
        # One that stays is not waited for, however long it stays.
        async with socket_to(address) as one:
            assert (await ask(one, step()))["type"] == "observation"
            async with socket_to(address) as other:
                assert json.loads(await other.recv())["data"]["code"] == "CAPACITY_REACHED"


async def test_environment_constructed_as_its_client_leaves_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = Counted.fresh()
    table = SessionTable(env, 1, Executor(1))
    submit = ThreadPool.submit

    def submit_cancelled(pool: ThreadPool, fn: Any, on_outcome: Any) -> ThreadCall:
        def deliver_and_cancel(outcome: Any) -> None:
            on_outcome(outcome)
            task.cancel()

        return submit(pool, fn, deliver_and_cancel)

    monkeypatch.setattr(ThreadPool, "submit", submit_cancelled)

    async def take() -> None:
        async with table.session():
            raise AssertionError

    task = asyncio.create_task(take())
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: env.closed == env.built == 1)
    assert table.active == 0


async def test_exclusive_class_keeps_its_slot_until_its_abandoned_step_and_close_end() -> None:
    class Mixed(SlowBlocking):
        SUPPORTS_CONCURRENT_SESSIONS = False

        async def close(self) -> None:
            await asyncio.sleep(0.01)
            assert table.active == 1  # alone until its very end
            type(self).closed += 1

    env = Mixed.fresh()
    app = app_of(env, cap=1)
    table = app.sessions
    async with serving(app) as address:
        async with socket_to(address) as ws:
            await start_step(ws, env)
            ws.transport.abort()
        await eventually(lambda: table.executor.abandoned == 1)
        assert (table.active, env.closed) == (1, 0)
        env.release.set()
        await eventually(lambda: table.active == 0)
        assert env.closed == 1


async def test_thread_of_a_failed_constructor_ends() -> None:
    class Alone(Counter):
        BLOCKING = True
        REQUIRES_SINGLE_THREAD_EXECUTOR = True

        def __init__(self) -> None:
            raise RuntimeError("on purpose")

    executor = Executor(1)
    before = set(threading.enumerate())
    for _ in range(3):
        with pytest.raises(RuntimeError):
            await executor.construct(Alone, lambda *_: None)
    await eventually(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("kind", [CountedInline, CountedAsync], ids=lambda kind: kind.__name__)
async def test_client_that_answers_no_pings_loses_its_slot(kind: type[Counted]) -> None:
    env = kind.fresh()
    app = app_of(env, cap=1)
    async with serving(app, ws_ping_interval=0.1, ws_ping_timeout=0.1) as address, socket_to(address) as ws:
        await eventually(lambda: env.built == 1)
        ws.transport.pause_reading()  # answers no ping, as a machine that has lost its power
        await eventually(lambda: env.closed == 1)
        await eventually(lambda: app.sessions.active == 0)
        ws.transport.abort()
