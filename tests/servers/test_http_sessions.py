"""Plain HTTP with a session: a header or a cookie makes reset, step and state stateful."""

import asyncio
from typing import Any
from uuid import UUID

import httpx
import pytest
from counter import (
    Add,
    AsyncCounter,
    Awkward,
    BlockingCounter,
    Count,
    Counter,
    SlowAsync,
    SlowBlocking,
    Unbuildable,
)
from serving import PATIENCE_S, eventually, request, serving, socket_to

from servers import create_app
from servers.app import EnvironmentApp
from servers.sessions.session import MAX_WAITING
from servers.settings import ServerSettings

EVERY_WAY = pytest.mark.parametrize("env", [Counter, BlockingCounter, AsyncCounter], ids=lambda e: e.__name__)
HEADER = "X-OpenEnv-Session"
STEP = {"action": {"amount": 2}}


def app_of(env: Any, cap: int = 4, **options: Any) -> EnvironmentApp:
    return create_app(env, Add, Count, max_concurrent_envs=cap, **options)


@EVERY_WAY
async def test_an_episode_under_an_id_of_the_callers_choice(env: type[Counter]) -> None:
    app = app_of(env)
    async with serving(app) as address:
        named = {HEADER: "my-run_1.2"}
        for path in ("/step", "/state"):
            reply = await request(address, "POST" if path == "/step" else "GET", path, STEP, named)
            assert reply.status_code == 404
            assert reply.json()["detail"]["message"] == "Unknown session_id: my-run_1.2"
        reply = await request(address, "POST", "/reset", {"seed": 3, "episode_id": "e"}, named)
        assert reply.status_code == 200
        assert reply.headers[HEADER] == "my-run_1.2"
        assert reply.headers["set-cookie"] == "openenv_session=my-run_1.2; HttpOnly; SameSite=Strict; Path=/"
        for total in (5, 7):
            reply = await request(address, "POST", "/step", STEP, named)
            assert (reply.json()["observation"]["total"], reply.json()["reward"]) == (total, 1.0)
            assert reply.headers[HEADER] == "my-run_1.2"
            assert "set-cookie" not in reply.headers
        state = (await request(address, "GET", "/state", headers=named)).json()
        assert (state["episode_id"], state["step_count"], state["total"]) == ("e", 2, 7)
        assert (await request(address, "POST", "/reset", None, named)).json()["observation"]["total"] == 0
        assert app.sessions.active == 1
        # Without the header each call stands alone.
        assert (await request(address, "POST", "/step", STEP)).json()["observation"]["total"] == 2
        assert app.sessions.active == 1


async def test_an_id_of_the_servers_choice_and_its_cookie() -> None:
    app = app_of(Counter)
    async with (
        serving(app) as address,
        httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=PATIENCE_S) as browser,
    ):
        reply = await browser.post("/reset", json={"seed": 1}, headers={HEADER: "new"})
        session = reply.headers[HEADER]
        assert UUID(session).version == 4
        assert (await browser.post("/step", json=STEP)).json()["observation"]["total"] == 3
        assert (await browser.post("/step", json=STEP)).json()["observation"]["total"] == 5
        # The header goes before the cookie.
        assert (await browser.get("/state", headers={HEADER: "other"})).status_code == 404
        again = await browser.post("/reset", headers={HEADER: "new"})
        assert again.headers[HEADER] != session
        assert app.sessions.active == 2
        async with socket_to(address, f"?session_id={session}") as ws:
            await ws.send('{"type":"state"}')
            assert '"total":5' in str(await ws.recv())


@pytest.mark.parametrize("session", ["", "a b", "a/b", "ä", "x" * 129, "a;b"])
async def test_what_is_no_id(session: str) -> None:
    app = app_of(Counter)
    async with serving(app) as address:
        for method, path in (("POST", "/reset"), ("POST", "/step"), ("GET", "/state")):
            headers: Any = {HEADER: session.encode()}
            reply = await request(address, method, path, STEP if path == "/step" else None, headers)
            assert reply.status_code == 422
            assert reply.json()["detail"][0]["loc"] == ["header", "x-openenv-session"]
        reply = await request(address, "GET", "/state", None, {"cookie": "openenv_session=a/b"})
        assert reply.json()["detail"][0]["loc"] == ["cookie", "openenv_session"]
        assert app.sessions.active == 0


async def test_sessions_count_against_the_cap() -> None:
    app = app_of(Counter, cap=1)
    async with serving(app) as address:
        assert (await request(address, "POST", "/reset", None, {HEADER: "a"})).status_code == 200
        for method, path, headers in (
            ("POST", "/reset", {HEADER: "b"}),
            ("POST", "/reset", {HEADER: "new"}),
            ("POST", "/reset", {}),
            ("POST", "/step", {}),
            ("GET", "/state", {}),
        ):
            reply = await request(address, method, path, STEP if path == "/step" else None, headers)
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) >= 1
            detail = reply.json()["detail"]
            assert detail["code"] == "CAPACITY_REACHED"
            assert (detail["active_sessions"], detail["max_sessions"]) == (1, 1)
        assert (await request(address, "POST", "/step", STEP, {HEADER: "a"})).status_code == 200


async def test_a_refused_or_failed_opening_leaves_nothing() -> None:
    app = app_of(Unbuildable)
    async with serving(app) as address:
        reply = await request(address, "POST", "/reset", None, {HEADER: "a"})
        assert (reply.status_code, reply.json()["detail"]["code"]) == (500, "FACTORY_ERROR")
        reply = await request(address, "POST", "/reset", {"seed": -1}, {HEADER: "a"})
        assert reply.status_code == 422
        assert app.sessions.active == 0
        assert not app.sessions._sessions


async def test_an_environment_that_raises_keeps_its_session() -> None:
    async with serving(app_of(Awkward)) as address:
        await request(address, "POST", "/reset", None, {HEADER: "a"})
        reply = await request(address, "POST", "/step", {"action": {"amount": 6}}, {HEADER: "a"})
        assert (reply.status_code, reply.json()) == (500, {"detail": "lone surrogate ?"})
        reply = await request(address, "POST", "/step", {"action": {"amount": 8}}, {HEADER: "a"})
        assert reply.json()["metadata"] == {"why": "because"}


async def test_one_call_at_a_time_and_a_bounded_queue() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address:
        await request(address, "POST", "/reset", None, {HEADER: "a"})
        calls = [
            asyncio.create_task(request(address, "POST", "/step", STEP, {HEADER: "a"}))
            for _ in range(MAX_WAITING + 8)
        ]
        await eventually(lambda: sum(call.done() for call in calls) == 7)
        refused = [call.result() for call in calls if call.done()]
        assert all((reply.status_code, reply.headers["retry-after"]) == (429, "1") for reply in refused)
        await eventually(lambda: env.stepping == 1)
        env.release.set()
        statuses = [(await call).status_code for call in calls]
        assert sorted(statuses) == [200] * (MAX_WAITING + 1) + [429] * 7


async def test_two_openings_of_one_id_make_one_session() -> None:
    app = app_of(BlockingCounter)
    async with serving(app) as address:
        replies = await asyncio.gather(
            *(request(address, "POST", "/reset", None, {HEADER: "a"}) for _ in range(8))
        )
        assert [reply.status_code for reply in replies] == [200] * 8
        assert app.sessions.active == 1


async def test_a_call_goes_on_when_its_client_leaves() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address:
        await request(address, "POST", "/reset", None, {HEADER: "a"})
        leaving = asyncio.create_task(request(address, "POST", "/step", STEP, {HEADER: "a"}))
        await eventually(env.entered.is_set)
        leaving.cancel()
        waiting = asyncio.create_task(request(address, "GET", "/state", headers={HEADER: "a"}))
        env.release.set()
        assert (await waiting).status_code == 200
        assert (env.stepping, env.closed) == (0, 0)


async def test_a_hung_step_of_a_client_that_left_is_ended_at_its_deadline() -> None:
    env = SlowAsync.fresh()
    app = app_of(env, cap=1)
    app.configure(ServerSettings(step_timeout_s=0.3))
    async with serving(app) as address:
        await request(address, "POST", "/reset", None, {HEADER: "a"})
        leaving = asyncio.create_task(request(address, "POST", "/step", STEP, {HEADER: "a"}))
        await eventually(env.entered.is_set)
        leaving.cancel()
        await eventually(lambda: app.sessions.active == 0)
        await eventually(lambda: env.closed == 1)
        assert env.stepping == 0


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ("[" * 10_000, ["body", 202]),
        ('{"action":' * 10_000, None),
        ('{"action":{"amount":NaN}}', ["body", 21]),
        ('{"action":{"amount":1},"timeout_s":Infinity}', ["body", 36]),
        ('{"action":{"amount":-Infinity}}', None),
        (b'{"action":{"amount":"\xff"}}', None),
        (b"\xff\xfe", ["body", 1]),
        ('{"action":{"amount":"\\ud800"}}', None),
        ("1" * 5000, None),
        ("", None),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_bodies_that_are_no_json(body: str | bytes, loc: Any) -> None:
    async with serving(app_of(Counter, env_name="counter")) as address:
        for path in ("/step", "/reset", "/counter/tasks") if body else ("/step", "/counter/tasks"):
            reply = await request(address, "POST", path, body)
            assert reply.status_code == 422
            assert "Traceback" not in reply.text
            if loc is not None and path != "/counter/tasks":  # there the framework tells
                assert reply.json()["detail"][0]["loc"] == loc


async def test_a_fault_in_a_later_line_is_placed() -> None:
    async with serving(app_of(Counter)) as address:
        reply = await request(address, "POST", "/step", '{\n "action":\n  nope}')
        assert reply.json()["detail"][0]["loc"] == ["body", 17]


async def test_other_types_of_content_are_refused() -> None:
    async with serving(app_of(Counter)) as address:
        for kind, status in (
            ("text/plain", 422),
            ("application/x-www-form-urlencoded", 422),
            ("application/json; charset=utf-8", 200),
            ("application/problem+json", 200),
        ):
            reply = await request(address, "POST", "/step", STEP, {"content-type": kind})
            assert reply.status_code == status


async def test_the_bare_action_of_the_oldest_clients() -> None:
    async with serving(app_of(Counter)) as address:
        reply = await request(address, "POST", "/step", {"amount": 3})
        assert (reply.status_code, reply.json()["observation"]["total"]) == (200, 3)
        for body in ({"wrong": 1}, {}, {"amount": "x"}, {"timeout_s": 3}):
            reply = await request(address, "POST", "/step", body)
            assert reply.status_code == 422
            assert reply.json()["detail"][0]["loc"] == ["body", "action"]
        reply = await request(address, "POST", "/step", {"action": {"wrong": "hi"}})
        assert [fault["loc"] for fault in reply.json()["detail"]] == [["amount"], ["wrong"]]
