"""Owners of sessions, caps per token, idle timeouts, and draining."""

import asyncio
import json
import logging

import pytest
from counter import BlockingCounter, Counter, SlowBlocking
from server_apps import EVERY_WAY, HEADER, STATE, action, app_of, step
from serving import ask, eventually, open_session, request, rpc, serving, socket_to, wait_close_code

from benchmarks.simulated_time import simulate
from openenv_core.pending import Pending
from openenv_core.protocol.errors import RefusalError
from servers.execution import Executor
from servers.sessions import AwaitedCall, SessionTable
from servers.sessions import table as sessions_table

TOKENS = ("a" * 32, "b" * 32)
A, B = ({"authorization": f"Bearer {token}"} for token in TOKENS)


# Turns


async def test_cancelled_callers_leave_the_queue_of_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servers.sessions.session.MAX_WAITING", 1)
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address:
        await request(address, "POST", "/reset", None, {HEADER: "one"})
        call = asyncio.create_task(request(address, "POST", "/step", action(), {HEADER: "one"}))
        await eventually(env.entered.is_set)
        (standing,) = app.sessions.standing
        for _ in range(3):
            waiting = asyncio.create_task(request(address, "POST", "/step", action(), {HEADER: "one"}))
            await eventually(lambda: standing.waiting_calls == 1)
            waiting.cancel()
            await eventually(lambda: standing.waiting_calls == 0)
        env.release.set()
        assert (await call).status_code == 200


async def test_result_that_comes_as_its_caller_is_cancelled_is_discarded() -> None:
    app = app_of(Counter)
    session = await app.sessions.open("")
    discarded: list[str] = []
    call = AwaitedCall(lambda: Pending(asyncio.sleep(0.01, "a state")), True, discarded.append)
    caller = asyncio.create_task(session.perform(call))
    call.result.add_done_callback(lambda _: caller.cancel())
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert discarded == ["a state"]
    await app.sessions.shut_down()


def test_concurrent_requests_for_a_pending_session_share_one_wait() -> None:
    async def ask(table: SessionTable) -> None:
        with pytest.raises(RefusalError, match="1 of 1 in use"):
            await table.find_or_open("", "one", wait_s=10)

    async def wait() -> float:
        app = app_of(Counter, cap=1, max_wait_s=600.0)
        await app.sessions.open("")
        clock = asyncio.get_running_loop().time
        began = clock()
        await asyncio.gather(*(ask(app.sessions) for _ in range(5)))
        waited_s = clock() - began
        waiting = asyncio.create_task(app.sessions.find_or_open("", "one", wait_s=500))
        await asyncio.sleep(0)
        await ask(app.sessions)  # who comes later and waits for less is refused before
        assert not waiting.done()
        await app.sessions.shut_down()
        assert (await waiting).id == "one"
        return waited_s

    assert 10 <= simulate(wait()) < 11


# Owners


async def test_cap_per_token_holds() -> None:
    app = app_of(Counter, cap=3, tokens=TOKENS, max_sessions_per_token=2)
    async with serving(app) as address:
        first, _ = await open_session(address, **A), await open_session(address, **A)
        reply = await rpc(address, "openenv/session/create", **A)
        assert reply["error"]["data"] == {"active_sessions": 2, "max_sessions": 2}
        assert (await request(address, "POST", "/reset", None, A)).status_code == 503
        await open_session(address, **B)
        reply = await rpc(address, "openenv/session/create", **B)
        assert reply["error"]["data"] == {"active_sessions": 3, "max_sessions": 3}
        await rpc(address, "openenv/session/close", {"session_id": first}, **A)
        await open_session(address, **A)


async def test_closing_an_old_session_keeps_the_new_one_of_the_same_id() -> None:
    table = SessionTable(Counter, 2, Executor(2))
    old = await table.open("", "same")
    table.drop(old)
    new = await table.open("", "same")
    await table.close(old)  # by somebody who had found it before it ended
    assert table.find("", "same") is new
    await table.shut_down()
    assert table.active == 0


# The reaper


async def test_idle_sessions_are_closed() -> None:
    class Closing(BlockingCounter):
        closed = 0

        def close(self) -> None:
            Closing.closed += 1

    app = app_of(Closing, idle_timeout_s=0.2)
    async with serving(app) as address:
        session = await open_session(address)
        await request(address, "POST", "/reset", None, {HEADER: "a"})
        await eventually(lambda: app.sessions.active == 0)
        assert Closing.closed == 2
        assert not app.sessions._sessions
        assert (await request(address, "GET", "/state", headers={HEADER: "a"})).status_code == 404
        assert (await rpc(address, "tools/list", {"session_id": session}))["error"]["code"] == -32602
        await open_session(address)  # the reaper has ended with its last session, and begins again
        await eventually(lambda: app.sessions.active == 0)


async def test_session_with_a_socket_or_call_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_table, "MAX_INTERVAL_S", 0.02)  # a lower limit is heeded at once
    env = SlowBlocking.fresh()
    app = app_of(env, idle_timeout_s=600)
    async with serving(app) as address:
        attached, lonely = await open_session(address), await open_session(address)
        async with socket_to(address, f"?session_id={attached}"), socket_to(address) as bound:
            (standing,) = (session for session in app.sessions.standing if session.id == attached)
            await eventually(lambda: standing.attachment)
            await request(address, "POST", "/reset", None, {HEADER: "busy"})
            call = asyncio.create_task(request(address, "POST", "/step", action(), {HEADER: "busy"}))
            await eventually(env.entered.is_set)
            app.sessions._idle_timeout_s = 0.1  # from when all of them stand, however long that took
            await eventually(lambda: ("", lonely) not in app.sessions._sessions)
            await asyncio.sleep(0.5)  # several times the limit; that nothing happens has no event to wait for
            assert app.sessions.active == 3
            env.release.set()
            assert (await call).status_code == 200
            assert (await ask(bound, {"type": "reset"}))["type"] == "observation"
        await eventually(lambda: app.sessions.active == 0)


async def test_unused_session_is_closed_sooner_and_frees_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions_table, "UNUSED_SESSION_TTL_S", 0.1)
    app = app_of(Counter, cap=2, idle_timeout_s=600)
    async with serving(app) as address:
        await open_session(address)
        await request(address, "POST", "/reset", None, {HEADER: "used"})
        await eventually(lambda: app.sessions.active == 1)
        assert (await request(address, "GET", "/state", headers={HEADER: "used"})).status_code == 200
        await open_session(address)


async def test_failed_close_of_an_idle_session_is_logged_and_retried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = app_of(Counter, idle_timeout_s=0.1)
    async with serving(app) as address:
        with monkeypatch.context() as broken, caplog.at_level(logging.ERROR, "servers"):
            broken.setattr(app.sessions, "drop", lambda _: 1 / 0)
            await open_session(address)
            await eventually(lambda: "could not be ended" in caplog.text)
        await eventually(lambda: app.sessions.active == 0)


# A server that stops


@EVERY_WAY
async def test_draining_closes_idle_sockets_and_refuses_new_sessions(env: type[Counter]) -> None:
    app = app_of(env)
    async with serving(app) as address:
        session = await open_session(address)
        await open_session(address)
        async with (
            socket_to(address) as ws,
            socket_to(address, f"?session_id={session}") as attached,
            socket_to(address, path="/mcp") as mcp,
        ):
            for connection in (ws, attached):
                assert (await ask(connection, STATE))["type"] == "state"
            await ask(mcp, {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
            drained = asyncio.create_task(app.drain(60))
            for connection in (ws, attached, mcp):
                assert await wait_close_code(connection) == 1001
            await drained
        assert app.sessions.active == 0
        assert not app.sessions._sessions
        async with socket_to(address) as late:
            assert json.loads(await late.recv())["data"]["code"] == "CAPACITY_REACHED"
            assert await wait_close_code(late) == 1000
        assert (await request(address, "POST", "/reset")).status_code == 503
        assert (await rpc(address, "openenv/session/create"))["error"]["code"] == -32000
    async with serving(app) as address:  # an app may be served again
        assert (await request(address, "POST", "/reset")).status_code == 200


async def test_draining_answers_running_steps_first() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address:
        await request(address, "POST", "/reset", None, {HEADER: "a"})
        call = asyncio.create_task(request(address, "POST", "/step", action(), {HEADER: "a"}))
        await eventually(lambda: env.stepping == 1)
        async with socket_to(address) as ws:
            await ws.send(json.dumps(step()))
            await ws.send(json.dumps(step()))  # one too many: it came before its turn
            await eventually(lambda: env.stepping == 2)
            drained = asyncio.create_task(app.drain(60))
            assert not drained.done()
            env.release.set()
            assert json.loads(await ws.recv())["type"] == "observation"
            assert await wait_close_code(ws) == 1001
        assert (await call).status_code == 200
        await drained
        assert (env.closed, app.sessions.active) == (2, 0)


async def test_draining_returns_at_its_deadline() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address, socket_to(address) as ws:
        await request(address, "POST", "/reset", None, {HEADER: "a"})
        call = asyncio.create_task(request(address, "POST", "/step", action(), {HEADER: "a"}))
        await ws.send(json.dumps(step()))
        await eventually(lambda: env.stepping == 2)
        await asyncio.wait_for(app.drain(0.2), 60)
        assert (await call).status_code == 404  # its session has been ended
        assert app.sessions.active == 1  # the socket's; it goes with the server
    env.release.set()
    await eventually(lambda: app.sessions.active == 0)
