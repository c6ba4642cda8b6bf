"""Environments that ignore cancellation, raise unusual exceptions, or are none: only their own session suffers."""

import asyncio
import inspect
import json
import threading
from typing import Any

import numpy as np
import pytest
from counter import (
    Add,
    AsyncCounter,
    BlockingCounter,
    Count,
    Counter,
    SlowAsync,
    SlowBlocking,
    SlowConstructor,
)
from server_apps import HEADER, STATE, Deaf, action, start_step, step
from server_apps import app_of as app_with
from serving import WAIT_TIMEOUT_S, ask, eventually, open_session, request, rpc, serving, socket_to

from servers import execution
from servers.app import EnvironmentApp
from servers.execution import Executor
from servers.sessions import SessionTable

STEP = step()


def app_of(env: Any, cap: int = 4, **settings: Any) -> EnvironmentApp:
    return app_with(env, cap, **{"step_timeout_s": None, **settings})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "CLOSE_TIMEOUT_S", 0.1)


class Stop(BaseException):
    """A BaseException, as libraries raise for a panic or the end of a test."""


def raising(kind: type[Counter]) -> Any:
    """Return a counter that raises in one method; the test sets `where` and `error`."""

    def at(name: str) -> Any:
        original = getattr(kind, name)

        def method(self: Any, *args: Any, **options: Any) -> Any:
            if made.where == name:
                raise made.error("on purpose")
            return original(self, *args, **options)

        async def later(self: Any, *args: Any, **options: Any) -> Any:
            result = method(self, *args, **options)
            return await result if inspect.isawaitable(result) else result

        return later if kind is AsyncCounter and name != "__init__" else method

    def state(self: Any) -> Any:
        if made.where == "state":
            raise made.error("on purpose")
        return super(made, self).state

    names = {name: at(name) for name in ("__init__", "reset", "step", "close")}
    made: Any = type("Raising", (kind,), {**names, "state": property(state), "where": "", "error": Stop})
    return made


KINDS = pytest.mark.parametrize("kind", [Counter, BlockingCounter, AsyncCounter])
ERRORS = [
    Stop,
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
    asyncio.CancelledError,
    SystemExit,
    KeyboardInterrupt,
]
ASKING = {
    "reset": ({"type": "reset"}, "POST", "/reset", None),
    "step": (STEP, "POST", "/step", action()),
    "state": (STATE, "GET", "/state", None),
}


@KINDS
async def test_any_exception_of_a_method_is_an_error_and_the_session_stays(kind: type[Counter]) -> None:
    env = raising(kind)
    app = app_of(env)
    async with serving(app) as address:
        standing = await open_session(address)
        for env.where, (frame, method, path, body) in ASKING.items():
            for env.error in ERRORS:
                for query in ("", f"?session_id={standing}"):
                    async with socket_to(address, query) as ws:
                        for _ in range(2):
                            assert (await ask(ws, frame))["data"]["code"] == "EXECUTION_ERROR", env.error
                headers: dict[str, str]
                for headers in ({}, {HEADER: standing}):
                    assert (await request(address, method, path, body, headers)).status_code == 500, env.error
        await rpc(address, "openenv/session/close", {"session_id": standing})
        await eventually(lambda: app.sessions.active == 0)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it cannot be said")


class EndlessError(Exception):
    def __str__(self) -> str:
        return "x" * 3_000_000


@KINDS
async def test_errors_without_text_or_with_huge_text_are_reported_briefly(kind: type[Counter]) -> None:
    errors: list[type[Exception]] = [UnspeakableError, EndlessError]
    env = raising(kind)
    env.where = "step"
    async with serving(app_of(env)) as address:
        for env.error in errors:
            async with socket_to(address) as ws:
                assert (await ask(ws, STEP))["data"]["code"] == "EXECUTION_ERROR"
            reply = await request(address, "POST", "/step", action())
            assert reply.status_code == 500
            assert len(reply.content) < 20_000


@KINDS
async def test_options_may_have_any_name(kind: type[Counter]) -> None:
    options = dict.fromkeys(("self", "fn", "args", "runner", "options", "kwargs", "name"), 1)
    async with serving(app_of(kind)) as address:
        async with socket_to(address) as ws:
            assert (await ask(ws, {"type": "reset", "data": options}))["type"] == "observation"
        assert (await request(address, "POST", "/reset", options)).status_code == 200
        assert (await request(address, "POST", "/step", {**action(), **options})).status_code == 200


@KINDS
async def test_any_exception_of_constructor_or_close_frees_the_slot(kind: type[Counter]) -> None:
    env = raising(kind)
    app = app_of(env)
    async with serving(app) as address:
        for env.error in ERRORS:
            env.where = "__init__"
            async with socket_to(address) as ws:
                reply = json.loads(await asyncio.wait_for(ws.recv(), WAIT_TIMEOUT_S))
                assert reply["data"]["code"] == "FACTORY_ERROR", env.error
            assert (await request(address, "POST", "/reset")).status_code == 500
            assert (await rpc(address, "openenv/session/create"))["error"]["code"] == -32000
            await eventually(lambda: app.sessions.active == 0)
            env.where = "close"
            async with socket_to(address) as ws:
                assert (await ask(ws, {"type": "reset"}))["type"] == "observation"
            assert (await request(address, "POST", "/reset")).status_code == 200
            await rpc(address, "openenv/session/close", {"session_id": await open_session(address)})
            await eventually(lambda: app.sessions.active == 0)


class NeverClosed(Deaf):
    """Its close ignores cancellation."""

    async def close(self) -> None:  # type: ignore[override]
        await self.step(Add(amount=1))


@pytest.mark.usefixtures("impatient")
async def test_endless_close_keeps_no_slot() -> None:
    env = NeverClosed.fresh()
    app = app_of(env)
    async with serving(app) as address:
        try:
            async with socket_to(address) as ws:
                await ws.send('{"type":"close"}')
                await ws.wait_closed()
            await rpc(address, "openenv/session/close", {"session_id": await open_session(address)})
            await eventually(lambda: app.sessions.active == 0)
        finally:
            env.release.set()


@pytest.mark.usefixtures("impatient")
async def test_close_waits_for_a_free_thread() -> None:
    env = SlowBlocking.fresh()
    executor = Executor(1)
    session = await SessionTable(env, 1, executor).open("")
    ended: list[object] = []
    for _ in range(executor.pool.size):
        executor.pool.submit(env.release.wait, ended.append)
    await session.close_environment()  # as long as whoever ends a session waits for it
    assert env.closed == 0
    env.release.set()
    await eventually(lambda: env.closed == 1)
    await eventually(lambda: len(ended) == executor.pool.size)
    executor.close()


class NeverReturns(SlowBlocking):
    """Its close blocks a thread."""

    def close(self) -> None:
        self.release.wait(60)
        super().close()


@pytest.mark.usefixtures("impatient")
async def test_hanging_close_is_abandoned() -> None:
    env = NeverReturns.fresh()
    executor = Executor(1)
    session = await SessionTable(env, 1, executor).open("")
    try:
        session.discard()
        await eventually(lambda: executor.abandoned == 1)
    finally:
        env.release.set()
    await eventually(lambda: executor.abandoned == 0)
    assert env.closed == 1
    executor.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("attached", [False, True])
async def test_disconnect_from_a_step_that_ignores_cancellation_frees_the_slot_at_the_deadline(
    attached: bool,
) -> None:
    env = Deaf.fresh()
    app = app_of(env, step_timeout_s=1.0)
    async with serving(app) as address:
        try:
            query = f"?session_id={await open_session(address)}" if attached else ""
            async with socket_to(address, query) as ws:
                await start_step(ws, env)
            await eventually(lambda: app.sessions.active == 0)
        finally:
            env.release.set()
        await eventually(lambda: env.closed == 1)


async def test_exclusive_class_is_not_constructed_twice_at_once() -> None:
    env = type("OneAtATime", (SlowConstructor,), {"SUPPORTS_CONCURRENT_SESSIONS": False}).fresh()
    app = app_of(env, cap=1)
    async with serving(app) as address:
        try:
            async with socket_to(address):
                await eventually(env.entered.is_set)
            async with socket_to(address) as ws:
                refused = json.loads(await asyncio.wait_for(ws.recv(), 60))
                assert refused["data"]["code"] == "CAPACITY_REACHED"
        finally:
            env.release.set()
        await eventually(lambda: app.sessions.active == 0)
        async with socket_to(address) as ws:
            assert (await ask(ws, {"type": "reset"}))["type"] == "observation"
        await eventually(lambda: env.closed == 2)


async def test_environment_is_closed_once() -> None:
    env = SlowAsync.fresh()
    app = app_of(env, step_timeout_s=1.0)
    async with serving(app) as address, socket_to(address) as ws:
        create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
        assert (await ask(ws, {"type": "mcp", "data": create}))["data"]["result"]["session_id"]
        assert (await ask(ws, STEP))["data"]["code"] == "SESSION_ERROR"
        await ws.wait_closed()
        await eventually(lambda: app.sessions.active == 0)
    assert env.closed == 1


class Plain:
    """Has only what an environment needs."""

    def reset(self) -> Count:
        return Count()

    step = reset


async def test_environment_without_close_ends_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    app = app_of(Plain, cap=1)
    async with serving(app) as address:
        async with socket_to(address) as ws:
            assert (await ask(ws, {"type": "reset"}))["type"] == "observation"
        await eventually(lambda: app.sessions.active == 0)
    assert not caplog.records


class Borrowed:
    """A proxy of an environment whose class lacks the methods."""

    def __init__(self, inner: Counter) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def test_object_that_is_not_an_environment_is_refused() -> None:
    app = app_of(lambda: Borrowed(Counter()), cap=1)
    async with serving(app) as address:
        async with socket_to(address) as ws:
            data = json.loads(await ws.recv())["data"]
            assert (data["code"], "Borrowed" in data["message"]) == ("FACTORY_ERROR", True)
        await eventually(lambda: app.sessions.active == 0)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def endless() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def telling(kind: type[Counter], *results: Any) -> type[Counter]:
    """Return a counter whose step returns the result at the index `amount`."""

    def step(self: Counter, action: Add) -> Any:
        return results[action.amount]

    return type("Telling", (kind,), {"step": step})


@pytest.mark.parametrize("kind", [Counter, BlockingCounter])
async def test_unencodable_observations_are_errors(kind: type[Counter]) -> None:
    extras = [nested(100_000), endless(), object(), threading.Lock(), nested(3_000)]
    results = [*(Count(extra=extra) for extra in extras), None, 7, {"total": 1}, Count, iter(())]
    async with serving(app_of(telling(kind, *results))) as address, socket_to(address) as ws:
        for number in range(len(results)):
            frame = {"type": "step", "data": {"amount": number}}
            assert (await ask(ws, frame))["data"]["code"] == "EXECUTION_ERROR", number
            assert (await ask(ws, {"type": "reset"}))["type"] == "observation"
            assert (await request(address, "POST", "/step", action(number))).status_code == 500


@pytest.mark.slow
async def test_large_observations_arrive() -> None:
    array, text = np.zeros(1_000_000), "x" * 20_000_000
    app = app_of(telling(BlockingCounter, Count(extra=array, reward=float("nan")), Count(extra=text)))
    async with serving(app) as address, socket_to(address, max_size=None) as ws:
        data = (await ask(ws, {"type": "step", "data": {"amount": 0}}))["data"]
        assert len(data["observation"]["extra"]) == 1_000_000
        assert data["reward"] is None
        assert len((await ask(ws, step(1)))["data"]["observation"]["extra"]) == 20_000_000
