"""A hanging environment or a client that does not read costs only its own session."""

import asyncio
import json
from typing import Any

import pytest
from counter import (
    Add,
    AsyncCounter,
    Count,
    Counter,
    Slow,
    SlowAsync,
    SlowBlocking,
    SlowConstructor,
    SlowSolitary,
)
from server_apps import HEADER, STATE, Deaf, action, start_step, step
from server_apps import app_of as app_with
from serving import ask, eventually, open_session, request, rpc, serving, socket_to, wait_close_code
from toolbox import toolbox_app

from benchmarks.simulated_time import simulate
from openenv_core import EnvironmentMetadata
from openenv_core.watchdog import Watchdog
from servers.app import EnvironmentApp

STEP_TIMEOUT_S = 1.0
"""What a call may take: those that hang have to wait for it, and the others must keep within it."""
HANG_TIMEOUT_S = 0.5
"""The same where all hang."""


class SlowReset(SlowBlocking):
    def reset(self, **options: Any) -> Count:  # type: ignore[override]
        return self.step(Add(amount=1))


class SlowState(SlowBlocking):
    @property
    def state(self) -> Any:
        self.step(Add(amount=1))
        return Counter().state


class SlowPromise(SlowAsync):
    """Declared as non-blocking, but returns a slow awaitable."""

    def step(self, action: Add) -> Any:
        return super().step(action)


class SolitaryConstructor(SlowConstructor):
    SUPPORTS_CONCURRENT_SESSIONS = False


class SlowMetadata(SlowBlocking):
    def get_metadata(self) -> EnvironmentMetadata:
        self.release.wait(60)
        return EnvironmentMetadata(name="late", description="late")


class Inline(Counter):
    """Steps on the event loop, and has a tool that never returns."""

    def list_tools(self) -> list[Any]:
        return []

    async def call_tool(self, name: str, arguments: Any, context: Any) -> Any:
        await asyncio.sleep(3600)


class SingleThread(SlowBlocking):
    REQUIRES_SINGLE_THREAD_EXECUTOR = True


def app_of(env: Any, cap: int = 1, **settings: Any) -> EnvironmentApp:
    return app_with(env, cap, **{"step_timeout_s": STEP_TIMEOUT_S, **settings})


HANGING: list[tuple[type[Slow], Any]] = [
    (SlowBlocking, step()),
    (SlowSolitary, step()),
    (SingleThread, step()),
    (SlowAsync, step()),
    (Deaf, step()),
    (SlowPromise, step()),
    (SlowReset, {"type": "reset"}),
    (SlowState, STATE),
    (SlowConstructor, None),
    (SolitaryConstructor, None),
]


async def test_socket_gets_an_error_at_the_deadline_and_its_slot_is_free_at_once() -> None:
    """So does plain HTTP, with status 504. Each environment is closed once."""

    async def hang(kind: type[Slow], frame: Any) -> None:
        env = kind.fresh()
        app = app_of(env, step_timeout_s=HANG_TIMEOUT_S)
        async with serving(app) as address:
            try:
                async with socket_to(address) as ws:
                    if frame is not None:
                        await ws.send(json.dumps(frame))
                    data = json.loads(await ws.recv())["data"]
                    assert data["code"] == "SESSION_ERROR"
                    assert f"within {HANG_TIMEOUT_S:g} s" in data["message"]
                    # The environment hangs still, and its place is free.
                    assert app.sessions.active == 0
                    assert await wait_close_code(ws) == 1000
                method, path, body = {
                    "step": ("POST", "/step", action()),
                    "state": ("GET", "/state", None),
                    "reset": ("POST", "/reset", None),
                }[(frame or {"type": "reset"})["type"]]
                reply = await request(address, method, path, body)
                assert (reply.status_code, reply.json()["detail"]["code"]) == (504, "SESSION_ERROR")
                assert app.sessions.active == 0
                assert (await request(address, "GET", "/health")).json() == {"status": "healthy"}
            finally:
                env.release.set()
            await eventually(lambda: app.sessions.executor.abandoned == 0)
            await eventually(lambda: env.closed == 2)

    await asyncio.gather(*(hang(*one) for one in HANGING))  # all deadlines run at once


async def test_standing_session_ends_at_the_deadline() -> None:
    async def hang(env: type[Slow]) -> None:
        app = app_of(env)
        named = {HEADER: "a"}
        async with serving(app) as address:
            try:
                assert (await request(address, "POST", "/reset", None, named)).status_code == 200
                leaving = asyncio.create_task(request(address, "POST", "/step", action(), named))
                await eventually(env.entered.is_set)
                if env.__name__ == "SlowAsync":
                    leaving.cancel()  # its deadline holds all the same
                else:
                    waiting = asyncio.create_task(request(address, "GET", "/state", headers=named))
                    assert (await leaving).status_code == 504
                    assert app.sessions.active == 0
                    assert (await waiting).status_code == 404
                await eventually(lambda: app.sessions.active == 0)
                assert (await request(address, "GET", "/state", headers=named)).status_code == 404
                assert (await rpc(address, "tools/list", {"session_id": "a"}))["error"]["code"] == -32602
            finally:
                env.release.set()
            await eventually(lambda: env.closed == 1)

    kinds: list[type[Slow]] = [SlowBlocking, SlowSolitary, SlowAsync, Deaf, SlowPromise]
    await asyncio.gather(*(hang(kind.fresh()) for kind in kinds))


async def test_hanging_call_of_one_client_ends_the_socket_of_another_at_its_next_request() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address:
        session = await open_session(address)
        async with socket_to(address, f"?session_id={session}") as ws:
            assert (await request(address, "POST", "/step", action(), {HEADER: session})).status_code == 504
            assert (await ask(ws, STATE))["data"]["code"] == "SESSION_ERROR"
            assert await wait_close_code(ws) == 1000
        env.release.set()
        await eventually(lambda: env.closed == 1)


async def test_socket_whose_own_tool_call_hangs_is_closed_after_the_reply() -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "wait"}}
    app = toolbox_app(cap=1, step_timeout_s=STEP_TIMEOUT_S)
    async with serving(app) as address, socket_to(address) as ws:
        reply = await ask(ws, {"type": "mcp", "data": call})
        assert f"within {STEP_TIMEOUT_S:g} s" in reply["data"]["error"]["message"]
        assert await wait_close_code(ws) == 1000
        assert app.sessions.active == 0


async def test_hanging_tool_call_ends_the_socket_of_an_environment_on_the_loop() -> None:
    async with serving(app_of(Inline)) as address:
        session = await open_session(address)
        async with socket_to(address, f"?session_id={session}") as ws:
            assert (await ask(ws, step()))["type"] == "observation"
            reply = await rpc(address, "tools/call", {"name": "wait", "session_id": session})
            assert f"within {STEP_TIMEOUT_S:g} s" in reply["error"]["message"]
            assert (await ask(ws, step()))["data"]["code"] == "SESSION_ERROR"
            assert await wait_close_code(ws) == 1000


async def test_metadata_fall_back_to_the_class_when_the_environment_hangs() -> None:
    env = SlowMetadata.fresh()
    app = app_of(env)
    async with serving(app) as address:
        try:
            metadata = (await request(address, "GET", "/metadata")).json()
            assert metadata["description"] != "late"
            assert app.sessions.active == 0
        finally:
            env.release.set()
        await eventually(lambda: env.closed == 1)


@pytest.mark.slow
async def test_deadline_applies_to_each_step_not_to_their_sum() -> None:
    class Unhurried(AsyncCounter):
        async def step(self, action: Add) -> Count:
            await asyncio.sleep(0.3)
            return Count()

    # All steps together take longer than one may; one alone has time for a machine that stands still meanwhile.
    app = app_of(Unhurried, step_timeout_s=2.0)
    async with serving(app) as address, socket_to(address) as ws:
        for _ in range(8):
            assert (await ask(ws, step()))["type"] == "observation"


async def test_exclusive_class_frees_its_slot_at_the_deadline_after_a_disconnect() -> None:
    env = SlowSolitary.fresh()
    app = app_of(env)
    async with serving(app) as address:
        async with socket_to(address) as ws:
            await start_step(ws, env)
            ws.transport.abort()
        await eventually(lambda: app.sessions.active == 0)
        assert (env.stepping, env.closed) == (1, 0)
        async with socket_to(address) as ws:
            assert (await ask(ws, {"type": "reset"}))["type"] == "observation"
        env.release.set()
        await eventually(lambda: env.closed == 2)
        await eventually(lambda: app.sessions.active == 0)


class Talkative(Counter):
    def step(self, action: Add) -> Count:
        return Count(extra="x" * 1_000_000)


class TalkativeAsync(Talkative):
    async def step(self, action: Add) -> Count:  # type: ignore[override]
        return Count(extra="x" * 1_000_000)


@pytest.mark.parametrize("env", [Talkative, TalkativeAsync], ids=lambda e: e.__name__)
@pytest.mark.parametrize(
    "protocol",
    [{}, pytest.param({"ws": "websockets-sansio"}, marks=pytest.mark.soak)],
    ids=["ours", "uvicorn's"],
)
async def test_client_that_does_not_read_is_disconnected(
    env: type[Counter], protocol: dict[str, str]
) -> None:
    app = app_of(env, cap=2, send_timeout_s=0.5)
    async with serving(app, **protocol) as address:
        session = await open_session(address)
        async with socket_to(address) as own, socket_to(address, f"?session_id={session}") as attached:
            for ws in (own, attached):
                assert (await ask(ws, {"type": "reset"}))["type"] == "observation"
                ws.transport.pause_reading()
                for _ in range(16):
                    await ws.send(json.dumps(step()))
            await eventually(lambda: app.sessions.active == 1)  # the standing one stays
            await eventually(lambda: not app.sessions.standing[0].attachment)
            await eventually(lambda: not app.sockets._conversations)
            own.transport.abort()
            attached.transport.abort()


async def test_client_that_reads_late_stays_connected() -> None:
    app = app_of(Talkative, send_timeout_s=20)
    async with serving(app) as address, socket_to(address) as ws:
        for _ in range(16):
            await ws.send(json.dumps(step()))
        ws.transport.pause_reading()
        await asyncio.sleep(0.3)
        ws.transport.resume_reading()
        for _ in range(16):
            assert json.loads(await ws.recv())["type"] == "observation"


def test_timer_of_one_request_does_not_end_the_next() -> None:
    async def run() -> list[float]:
        loop, expired = asyncio.get_running_loop(), list[float]()
        watchdog = Watchdog(1.0, lambda: expired.append(loop.time()))
        watchdog.start()
        watchdog.stop()
        await asyncio.sleep(0.6)
        watchdog.start()
        await asyncio.sleep(3)
        return expired

    assert simulate(run()) == [1.6]
