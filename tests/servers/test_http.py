"""Plain HTTP: single requests without a session, and several in one, named by a header or a cookie."""

import asyncio
import json
from typing import Any
from uuid import UUID

from counter import (
    AsyncCounter,
    BlockingCounter,
    Count,
    Counter,
    ReleasedCounter,
    SlowAsync,
    SlowBlocking,
    Unbuildable,
)
from server_apps import EVERY_WAY, HEADER, STATE, action, app_of
from serving import (
    WAIT_TIMEOUT_S,
    ask,
    eventually,
    http_client,
    request,
    rpc,
    serving,
    socket_to,
    wait_close_code,
)

from servers.routes.http import while_connected
from servers.sessions.session import MAX_WAITING

# Without a session


async def test_requests_without_a_session_each_get_a_new_environment() -> None:
    app = app_of(Counter)
    async with serving(app) as address:
        for body in (None, "", {}, {"seed": 2, "start": 1, "unknown": 1}):
            reply = await request(address, "POST", "/reset", body)
            assert reply.status_code == 200
            assert reply.json() == {
                "observation": {"metadata": {}, "total": 3 if body else 0, "extra": None},
                "reward": None,
                "done": False,
                "metadata": None,
            }
        for _ in range(2):
            reply = await request(address, "POST", "/step", {**action(), "unknown": 1})
            assert reply.json()["observation"]["total"] == 2
        assert (await request(address, "GET", "/state")).json()["total"] == 0
        assert app.sessions.active == 0


async def test_step_options_reach_the_environment() -> None:
    async with serving(app_of(ReleasedCounter)) as address:
        body = {**action(), "timeout_s": 1.5, "request_id": "r" * 255, "more": 1}
        reply = (await request(address, "POST", "/step", body)).json()
        # Metadata stand inside the observation, and beside it.
        assert reply["metadata"] == reply["observation"]["metadata"]
        assert reply["metadata"] == {"timeout_s": 1.5, "options": ["more", "request_id"]}


BAD_BODIES: list[tuple[str, Any, str | None, list[Any] | None]] = [
    ("/reset", {"seed": -1}, "greater_than_equal", ["body", "seed"]),
    ("/reset", {"seed": 2**70}, "less_than", ["body", "seed"]),
    ("/reset", {"seed": "abc"}, "int_parsing", ["body", "seed"]),
    ("/reset", '{"seed": NaN}', "json_invalid", ["body", 10]),
    ("/reset", {"episode_id": "x" * 256}, "string_too_long", ["body", "episode_id"]),
    ("/reset", "{", "json_invalid", ["body", 1]),
    ("/reset", "[" * 10_000, "json_invalid", ["body", 202]),
    ("/reset", [1], "model_attributes_type", ["body"]),
    ("/step", {}, "missing", ["body", "action"]),
    ("/step", None, "missing", ["body"]),
    ("/step", {"action": 3}, "dict_type", ["body", "action"]),
    ("/step", {**action(), "timeout_s": 0}, "greater_than", ["body", "timeout_s"]),
    ("/step", {**action(), "request_id": "x" * 256}, "string_too_long", ["body", "request_id"]),
    # Faults of the action are placed inside the action; those of one that came bare, at the action that is missing.
    ("/step", {"action": {}}, "missing", ["amount"]),
    ("/step", {"action": {"amount": 1, "wrong": 1}}, "extra_forbidden", ["wrong"]),
    ("/step", {"action": {"amount": 13}}, "value_error", ["amount"]),
    ("/step", {"amount": "x"}, "missing", ["body", "action"]),
    ("/step", {"timeout_s": 3}, "missing", ["body", "action"]),
    ("/step", '{"action":{"amount":NaN}}', "json_invalid", ["body", 21]),
    ("/step", '{"action":{"amount":1},"timeout_s":Infinity}', "json_invalid", ["body", 36]),
    ("/step", '{\n "action":\n  nope}', "json_invalid", ["body", 17]),
    ("/step", b'{"action":{"amount":"\xff"}}', None, None),
    ("/step", b"\xff\xfe", "json_invalid", ["body", 1]),
    ("/step", '{"action":{"amount":"\\ud800"}}', None, None),
    ("/step", "1" * 5000, None, None),
]


async def test_invalid_body_is_refused_with_the_location_of_its_fault() -> None:
    async with serving(app_of(Counter)) as address:
        for path, body, kind, place in BAD_BODIES:
            reply = await request(address, "POST", path, body)
            assert reply.status_code == 422, body
            fault = reply.json()["detail"][0]
            assert kind is None or (fault["type"], fault["loc"]) == (kind, place), body
        for content_type, status in (
            ("text/plain", 422),
            ("application/x-www-form-urlencoded", 422),
            ("application/json; charset=utf-8", 200),
            ("application/problem+json", 200),
        ):
            reply = await request(address, "POST", "/step", action(), {"content-type": content_type})
            assert reply.status_code == status, content_type


async def test_failed_opening_leaves_no_session() -> None:
    app = app_of(Unbuildable)
    name = {"factory_name": "Unbuildable"}
    fault = {"message": "no such counter", "code": "FACTORY_ERROR", **name}
    async with serving(app) as address:
        for headers in ({}, {HEADER: "a"}):
            reply = await request(address, "POST", "/reset", None, headers)
            assert (reply.status_code, reply.json()["detail"]) == (500, fault)
        error = (await rpc(address, "openenv/session/create"))["error"]
        assert error == {"code": -32000, "message": "no such counter", "data": name}
        async with socket_to(address) as ws:
            assert json.loads(await ws.recv()) == {"type": "error", "data": fault}
            assert await wait_close_code(ws) == 1000
        assert (await request(address, "POST", "/reset", {"seed": -1}, {HEADER: "a"})).status_code == 422
        assert app.sessions.active == 0
        assert not app.sessions._sessions


async def test_disconnect_frees_the_slot() -> None:
    env = SlowAsync.fresh()
    app = app_of(env, cap=1)
    async with serving(app) as address:
        leaving = asyncio.create_task(request(address, "POST", "/step", action()))
        await eventually(env.entered.is_set)
        leaving.cancel()
        await eventually(lambda: app.sessions.active == 0)
        assert (env.stepping, env.closed) == (0, 1)


async def test_call_that_outlasts_the_shutdown_is_answered_with_503() -> None:
    env = SlowAsync.fresh()
    async with serving(app_of(env), timeout_graceful_shutdown=0.1) as address:
        request_task = asyncio.create_task(request(address, "POST", "/step", action()))
        await eventually(env.entered.is_set)
    reply = await request_task
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["detail"]["code"] == "SESSION_ERROR"
    assert "is stopping" in reply.json()["detail"]["message"]


# In a session


@EVERY_WAY
async def test_episode_under_a_client_chosen_id(env: type[Counter]) -> None:
    app = app_of(env)
    async with serving(app) as address:
        named = {HEADER: "my-run_1.2"}
        for method, path, body in (("POST", "/step", action()), ("GET", "/state", None)):
            reply = await request(address, method, path, body, named)
            assert reply.status_code == 404
            assert reply.json()["detail"]["message"] == "Unknown session_id: my-run_1.2"
        reply = await request(address, "POST", "/reset", {"seed": 3, "episode_id": "e"}, named)
        assert reply.status_code == 200
        assert reply.headers[HEADER] == "my-run_1.2"
        cookie = "openenv_session=my-run_1.2; HttpOnly; SameSite=Strict; Path=/"
        assert reply.headers["set-cookie"] == cookie
        behind_tls = {**named, "X-Forwarded-Proto": "https"}
        reply = await request(address, "POST", "/reset", {"seed": 3, "episode_id": "e"}, behind_tls)
        assert reply.headers["set-cookie"] == f"{cookie}; Secure"
        for total in (5, 7):
            reply = await request(address, "POST", "/step", action(), named)
            assert (reply.json()["observation"]["total"], reply.json()["reward"]) == (total, 1.0)
            assert reply.headers[HEADER] == "my-run_1.2"
            assert "set-cookie" not in reply.headers
        state = (await request(address, "GET", "/state", headers=named)).json()
        assert (state["episode_id"], state["step_count"], state["total"]) == ("e", 2, 7)
        assert (await request(address, "POST", "/reset", None, named)).json()["observation"]["total"] == 0
        assert app.sessions.active == 1


async def test_server_chosen_id_and_its_cookie() -> None:
    app = app_of(Counter)
    async with (
        serving(app) as address,
        http_client(address) as browser,
    ):
        reply = await browser.post("/reset", json={"seed": 1}, headers={HEADER: "new"})
        session = reply.headers[HEADER]
        assert UUID(session).version == 4
        # The oldest clients send whole seconds beside the action, or the action by itself.
        body = {**action(), "timeout_s": 15}
        assert (await browser.post("/step", json=body)).json()["observation"]["total"] == 3
        assert (await browser.post("/step", json={"amount": 2})).json()["observation"]["total"] == 5
        # The header goes before the cookie.
        assert (await browser.get("/state", headers={HEADER: "other"})).status_code == 404
        again = await browser.post("/reset", headers={HEADER: "new"})
        assert again.headers[HEADER] != session
        assert app.sessions.active == 2
        async with socket_to(address, f"?session_id={session}") as ws:
            assert (await ask(ws, STATE))["data"]["total"] == 5


async def test_new_session_whose_client_leaves_before_it_learns_the_id_is_ended() -> None:
    entered = asyncio.Event()

    class SlowReset(AsyncCounter):
        async def reset(self, **_: Any) -> Count:  # type: ignore[override]
            entered.set()
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    app = app_of(SlowReset)
    async with serving(app) as address:
        creation = asyncio.create_task(request(address, "POST", "/reset", None, {HEADER: "new"}))
        await asyncio.wait_for(entered.wait(), WAIT_TIMEOUT_S)
        creation.cancel()
        await eventually(lambda: app.sessions.active == 0)


async def test_invalid_session_ids_are_refused() -> None:
    app = app_of(Counter)
    async with serving(app) as address:
        for session in ("", "a b", "a/b", "ä", "x" * 129, "a;b"):
            for method, path, body in (
                ("POST", "/reset", None),
                ("POST", "/step", action()),
                ("GET", "/state", None),
            ):
                headers: Any = {HEADER: session.encode()}
                reply = await request(address, method, path, body, headers)
                assert reply.status_code == 422, session
                assert reply.json()["detail"][0]["loc"] == ["header", "x-openenv-session"]
        reply = await request(address, "GET", "/state", None, {"cookie": "openenv_session=a/b"})
        assert reply.json()["detail"][0]["loc"] == ["cookie", "openenv_session"]
        assert app.sessions.active == 0


@EVERY_WAY
async def test_no_request_exceeds_the_cap(env: type[Counter]) -> None:
    app = app_of(env, cap=1)
    async with serving(app) as address:
        async with socket_to(address) as ws:
            await ask(ws, STATE)
            for method, path, body, headers in (
                ("POST", "/reset", None, {HEADER: "b"}),
                ("POST", "/reset", None, {HEADER: "new"}),
                ("POST", "/reset", None, {}),
                ("POST", "/step", action(), {}),
                ("GET", "/state", None, {}),
            ):
                reply = await request(address, method, path, body, headers)
                assert reply.status_code == 503
                assert int(reply.headers["retry-after"]) >= 1
                detail = reply.json()["detail"]
                assert detail["code"] == "CAPACITY_REACHED"
                assert (detail["active_sessions"], detail["max_sessions"]) == (1, 1)
        await eventually(lambda: app.sessions.active == 0)
        assert (await request(address, "POST", "/reset", None, {HEADER: "a"})).status_code == 200
        assert (await request(address, "POST", "/reset", None, {HEADER: "b"})).status_code == 503
        assert (await request(address, "POST", "/step", action(), {HEADER: "a"})).status_code == 200


async def test_calls_of_a_session_run_one_at_a_time_in_a_bounded_queue() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address:
        await request(address, "POST", "/reset", None, {HEADER: "a"})
        calls = [
            asyncio.create_task(request(address, "POST", "/step", action(), {HEADER: "a"}))
            for _ in range(MAX_WAITING + 8)
        ]
        await eventually(lambda: sum(call.done() for call in calls) == 7)
        refused = [call.result() for call in calls if call.done()]
        assert all((reply.status_code, reply.headers["retry-after"]) == (429, "1") for reply in refused)
        await eventually(lambda: env.stepping == 1)
        env.release.set()
        statuses = [(await call).status_code for call in calls]
        assert sorted(statuses) == [200] * (MAX_WAITING + 1) + [429] * 7


async def test_concurrent_openings_of_one_id_make_one_session() -> None:
    app = app_of(BlockingCounter)
    async with serving(app) as address:
        replies = await asyncio.gather(
            *(request(address, "POST", "/reset", None, {HEADER: "a"}) for _ in range(8))
        )
        assert [reply.status_code for reply in replies] == [200] * 8
        assert app.sessions.active == 1


async def test_call_in_a_standing_session_continues_after_a_disconnect() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address:
        await request(address, "POST", "/reset", None, {HEADER: "a"})
        leaving = asyncio.create_task(request(address, "POST", "/step", action(), {HEADER: "a"}))
        await eventually(env.entered.is_set)
        leaving.cancel()
        waiting = asyncio.create_task(request(address, "GET", "/state", headers={HEADER: "a"}))
        env.release.set()
        assert (await waiting).status_code == 200
        assert (env.stepping, env.closed) == (0, 0)


async def test_result_that_comes_with_the_disconnect_is_not_lost() -> None:
    """It may be a connection or a session, which somebody has to close."""

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def work(turns: int) -> bool:
        for _ in range(turns):
            await asyncio.sleep(0)
        made.append(turns)
        return True

    for turns in range(10):
        made: list[int] = []
        assert (await while_connected(receive, work(turns)) is None) == (not made)
