"""/ws: one session per socket, or a socket attached to a standing session (?session_id=)."""

import asyncio
import json
import threading
import time
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from counter import (
    Add,
    Awkward,
    BlockingCounter,
    Count,
    Counter,
    ReleasedCounter,
    Slow,
    SlowAsync,
    SlowBlocking,
    SlowConstructor,
)
from pydantic import BaseModel, Field, field_validator
from server_apps import EVERY_WAY, HEADER, STATE, action, app_of, mcp, start_step, step
from serving import (
    WAIT_TIMEOUT_S,
    ask,
    eventually,
    open_session,
    request,
    rpc,
    serving,
    socket_to,
    wait_close_code,
)
from websockets.asyncio.client import connect

from openenv_core import Action
from openenv_core.protocol.batch import SUBPROTOCOL, decode_frame
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.frames import RequestDecoder
from openenv_core.tools import ToolResult
from servers import create_app
from servers.routes import websocket

RESET = {"type": "reset"}


async def first_of(ws: Any) -> Any:
    """Return the data of the server's first message."""
    return json.loads(await asyncio.wait_for(ws.recv(), WAIT_TIMEOUT_S))["data"]


@EVERY_WAY
async def test_episode_over_a_socket(env: type[Counter]) -> None:
    async with serving(app_of(env)) as address, socket_to(address) as ws:
        # A session is there from the start: no reset is needed.
        state = {"episode_id": None, "step_count": 0, "total": 0, "thread": ""}
        assert await ask(ws, STATE) == {"type": "state", "data": state}
        reply = await ask(
            ws, {"type": "reset", "data": {"seed": 3, "episode_id": "e", "start": 1, "unknown": 9}}
        )
        assert reply == {
            "type": "observation",
            "data": {
                "observation": {"metadata": {}, "total": 4, "extra": None},
                "reward": None,
                "done": False,
            },
        }
        reply = await ask(ws, step())
        assert reply["data"]["observation"]["total"] == 6
        assert (reply["data"]["reward"], reply["data"]["done"]) == (1, False)
        state = (await ask(ws, STATE))["data"]
        assert (state["episode_id"], state["step_count"], state["total"]) == ("e", 1, 6)
        assert str(state["thread"]).startswith("environment" if env is BlockingCounter else "MainThread")
        assert (await ask(ws, step(9)))["data"]["done"] is True
        final_reply = await ask(ws, step())
        assert final_reply["data"]["code"] == "EXECUTION_ERROR"
        assert "call reset()" in final_reply["data"]["message"]
        for frame in (RESET, {"type": "reset", "data": {}}):
            assert (await ask(ws, frame))["data"]["observation"]["total"] == 0
        await ws.send('{"type":"close"}')
        assert await wait_close_code(ws) == 1000


@pytest.mark.parametrize("wrapped", ["receive", "send"])
async def test_wrapper_around_the_app_sees_every_message(wrapped: str) -> None:
    """Also for an environment that never waits, whose steps are otherwise answered where they are read."""
    app, messages = app_of(Counter), list[str]()

    async def wrapper(scope: Any, receive: Any, send: Any) -> None:
        async def recorded_receive() -> Any:
            message = await receive()
            messages.append(message["type"])
            return message

        async def recorded_send(message: Any) -> None:
            messages.append(message["type"])
            await send(message)

        if scope["type"] != "websocket":
            await app(scope, receive, send)
        elif wrapped == "receive":
            await app(scope, recorded_receive, send)
        else:
            await app(scope, receive, recorded_send)

    async with serving(wrapper) as address, socket_to(address) as ws:  # type: ignore[arg-type]
        for total in (2, 4):
            assert (await ask(ws, step()))["data"]["observation"]["total"] == total
        await ws.send('{"type":"close"}')
        assert await wait_close_code(ws) == 1000
    if wrapped == "receive":
        assert messages[:4] == ["websocket.connect", *["websocket.receive"] * 3]
    else:
        assert messages.count("websocket.send") == 2


async def test_released_async_methods_are_preferred_and_get_their_options() -> None:
    async with serving(app_of(ReleasedCounter)) as address, socket_to(address) as ws:
        data = (await ask(ws, {"type": "reset", "data": {"seed": 5, "natural": True}}))["data"]
        assert data["observation"]["total"] == 5
        assert data["metadata"] == data["observation"]["metadata"] == {"options": ["natural"]}
        assert (await ask(ws, step()))["data"]["observation"]["total"] == 2


BAD_FRAMES: list[tuple[Any, str, list[list[str]] | None]] = [
    ("{", "INVALID_JSON", None),
    ("[" * 100_000, "INVALID_JSON", None),
    ('{"type":"reset","data":{"start":NaN}}', "INVALID_JSON", None),
    (b'{"type":"state"}', "INVALID_JSON", None),
    ("[1]", "VALIDATION_ERROR", [[]]),
    ({}, "UNKNOWN_TYPE", None),
    ({"type": "stop"}, "UNKNOWN_TYPE", None),
    ({"type": "step"}, "VALIDATION_ERROR", [["data"]]),
    ({"type": "step", "data": 3}, "VALIDATION_ERROR", [["data"]]),
    ({"type": "step", "data": {}}, "VALIDATION_ERROR", [["amount"]]),
    ({"type": "step", "data": {"amount": "x"}}, "VALIDATION_ERROR", [["amount"]]),
    ({"type": "step", "data": {"amount": 1, "more": 1}}, "VALIDATION_ERROR", [["more"]]),
    # What the released /ws does not take either: something beside the action.
    ({"type": "step", "data": {"amount": 1}, "timeout_s": 1}, "VALIDATION_ERROR", [["timeout_s"]]),
    ({"type": "state", "more": 1}, "VALIDATION_ERROR", [["more"]]),
    ({"type": "step", "data": {"amount": 13}}, "VALIDATION_ERROR", [["amount"]]),
    ({"type": "reset", "data": {"seed": -7}}, "VALIDATION_ERROR", [["seed"]]),
    ({"type": "reset", "data": {"seed": "abc"}}, "VALIDATION_ERROR", [["seed"]]),
    ({"type": "reset", "data": {"episode_id": "x" * 256}}, "VALIDATION_ERROR", [["episode_id"]]),
]


@EVERY_WAY
async def test_invalid_frames_are_refused_and_the_session_stays(env: type[Counter]) -> None:
    async with serving(app_of(env)) as address, socket_to(address) as ws:
        await ask(ws, step(4))
        for frame, code, places in BAD_FRAMES:
            data = (await ask(ws, frame))["data"]
            assert data["code"] == code, frame
            if places is not None:
                assert data["message"] == "Invalid message"
                assert [fault["loc"] for fault in data["errors"]] == places, frame
            assert (await ask(ws, STATE))["data"]["total"] == 4


class Known(Add):
    @field_validator("amount")
    @classmethod
    def known(cls, value: int) -> int:
        return {1: 1, 2: 2}[value]  # a KeyError is none of pydantic's


@EVERY_WAY
async def test_any_exception_of_a_validator_is_an_error_and_the_session_stays(env: type[Counter]) -> None:
    async with serving(create_app(env, Known, Count)) as address, socket_to(address) as ws:
        await ask(ws, step())
        assert (await ask(ws, step(3)))["data"]["code"] == "EXECUTION_ERROR"
        assert (await ask(ws, step()))["data"]["observation"]["total"] == 4
    async with (
        serving(create_app(env, Known, Count, max_concurrent_envs=2)) as address,
        connect(f"ws://{address}/ws", subprotocols=[SUBPROTOCOL], proxy=None) as ws,
    ):
        await ask(ws, {"id": 1, "op": "open", "count": 2})
        assert (await ask(ws, {"id": 2, **step(3)}))["data"]["code"] == "EXECUTION_ERROR"
        actions = [{"amount": 3}, {"amount": 1}]
        await ws.send(json.dumps({"id": 3, "op": "step", "actions": actions, "at_least": 2}))
        many, _ = decode_frame(await ws.recv())
        assert many["errors"]["0"]["code"] == "EXECUTION_ERROR"
        assert (await ask(ws, {"id": 4, "member": 1, **step(1)}))["data"]["observation"]["total"] == 2


async def test_values_without_json_form_are_encoded_or_refused() -> None:
    async with serving(app_of(Awkward)) as address, socket_to(address) as ws:

        async def step_data(amount: int) -> Any:
            return (await ask(ws, step(amount)))["data"]

        await request(address, "POST", "/reset", None, {HEADER: "a"})
        arrays = {"array": [[0, 1], [2, 3]], "scalar": 1.5, "bytes": "_w=="}
        assert (await step_data(1))["observation"]["extra"] == arrays
        numbers = await step_data(2)
        assert numbers["reward"] == 0.5
        assert numbers["metadata"] == {"flag": True, "nan": [None]}
        for amount, text in [
            (3, "out of here"),
            (4, "got NoneType"),
            (5, "got object"),
            (6, "lone surrogate ?"),
            (7, ""),
            (9, "ValueError"),
            (10, "got builtin_function_or_method"),
        ]:
            failure = await step_data(amount)
            assert failure["code"] == "EXECUTION_ERROR"
            assert text in failure["message"]
            for headers in ({}, {HEADER: "a"}):
                over_http = await request(address, "POST", "/step", action(amount), headers)
                assert (over_http.status_code, text in over_http.json()["detail"]) == (500, True)
                assert "Traceback" not in over_http.text
        kept_reply = await step_data(8)
        assert kept_reply["metadata"] == kept_reply["observation"]["metadata"] == {"why": "because"}
        nans = await step_data(0)
        assert (nans["reward"], nans["metadata"]) == (None, {"unscored": "the reward is nan"})
        assert nans["observation"]["extra"] == {"nan": None, "inf": [None, None]}


# Clients that leave


@pytest.mark.parametrize("kind", [SlowAsync, SlowBlocking], ids=lambda kind: kind.__name__)
async def test_disconnect_during_a_step_frees_the_slot(kind: type[Slow]) -> None:
    env = kind.fresh()
    app = app_of(env, cap=1)
    executor = app.sessions.executor
    in_thread = kind is SlowBlocking
    async with serving(app) as address:
        async with socket_to(address) as ws:
            await start_step(ws, env)
            assert app.sessions.active == 1
            ws.transport.abort()
        await eventually(lambda: app.sessions.active == 0)
        assert (env.stepping, env.closed, executor.abandoned) == ((1, 0, 1) if in_thread else (0, 1, 0))
        async with socket_to(address) as ws:  # while the thread of the first, if it had one, hangs
            assert (await ask(ws, RESET))["type"] == "observation"
        env.release.set()
        await eventually(lambda: env.closed == 2)
        assert (env.stepping, executor.abandoned) == (0, 0)


async def test_abandoned_steps_hold_threads_up_to_a_limit() -> None:
    others = set(threading.enumerate())
    env = SlowBlocking.fresh()
    app = app_of(env, cap=1)
    table, executor = app.sessions, app.sessions.executor
    executor.limit = executor.pool.size + 1
    async with serving(app) as address:
        for number in range(1, executor.limit + 1):
            async with socket_to(address) as ws:
                await ws.send(json.dumps(step()))
                await eventually(lambda number=number: env.stepping == number)
                ws.transport.abort()
            await eventually(lambda: table.active == 0)
        async with socket_to(address) as ws:
            data = await first_of(ws)
            assert data["code"] == "CAPACITY_REACHED"
            assert "held by abandoned calls" in data["message"]
        health = await request(address, "GET", "/health")
        assert (health.status_code, health.json()) == (503, {"status": "unhealthy"})
        assert (await request(address, "POST", "/reset")).status_code == 503
        env.release.set()
        await eventually(lambda: executor.abandoned == 0)
        assert (await request(address, "GET", "/health")).json() == {"status": "healthy"}
        async with socket_to(address) as ws:
            assert (await ask(ws, RESET))["type"] == "observation"
        await eventually(lambda: env.closed == executor.limit + 1)
    threads = [one for one in set(threading.enumerate()) - others if one.name.startswith("environment")]
    assert len(threads) <= executor.pool.size + 1


async def test_disconnect_during_construction_frees_the_slot() -> None:
    env = SlowConstructor.fresh()
    app = app_of(env, cap=1)
    table = app.sessions
    async with serving(app) as address:
        async with socket_to(address) as ws:
            await eventually(env.entered.is_set)
            ws.transport.abort()
        await eventually(lambda: table.active == 0)
        assert (table.executor.abandoned, env.closed) == (1, 0)
        env.release.set()
        await eventually(lambda: (table.executor.abandoned, env.closed) == (0, 1))


async def test_frames_sent_ahead_are_bounded_in_number_and_size() -> None:
    for frames in ([step()] * 63, [{**STATE, "padding": "x" * 9_000_000}] * 2):
        env = SlowAsync.fresh()
        app = app_of(env)
        async with serving(app) as address, socket_to(address) as ws:
            await start_step(ws, env)
            for frame in frames:
                await ws.send(json.dumps(frame))
            data = await first_of(ws)
            assert (data["code"], "ahead" in data["message"]) == ("SESSION_ERROR", True)
            await eventually(lambda app=app: app.sessions.active == 0)


@pytest.mark.parametrize("leaves", [False, True])
async def test_frames_sent_during_a_step_in_a_thread_come_after_it(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "_MAX_PIPELINED_CHARS", 1000)
    env = SlowBlocking.fresh()
    app = app_of(env, cap=1)
    async with serving(app) as address, socket_to(address) as ws:
        await start_step(ws, env)
        for frame in (STATE, RESET, step()):
            await ws.send(json.dumps(frame))
        if leaves:
            ws.transport.abort()
            await eventually(lambda: app.sessions.active == 0)
            assert (env.stepping, env.closed, app.sessions.executor.abandoned) == (1, 0, 1)
        env.release.set()
        if not leaves:
            kinds = [json.loads(await asyncio.wait_for(ws.recv(), WAIT_TIMEOUT_S))["type"] for _ in range(4)]
            assert kinds == ["observation", "state", "observation", "observation"]
            for _ in range(3):  # the limit is on frames that wait, not on all that ever came
                env.release.clear()
                for _ in range(5):
                    await ws.send(json.dumps(step()) + 100 * " ")
                await eventually(lambda: env.stepping == 1)
                env.release.set()
                for _ in range(5):
                    assert json.loads(await ws.recv())["type"] == "observation"
            assert (await ask(ws, step()))["type"] == "observation"
    await eventually(lambda: (env.stepping, env.closed, app.sessions.executor.abandoned) == (0, 1, 0))


async def test_frame_that_waits_for_a_step_is_answered_before_one_that_arrives_as_the_step_ends() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address, socket_to(address) as ws:
        await start_step(ws, env)
        await ws.send(json.dumps(STATE))
        env.release.set()
        while env.stepping:
            time.sleep(0.001)  # noqa: ASYNC251 - the event loop is to learn of the end and of a frame in one turn
        await ws.send(json.dumps(step()))
        kinds = [json.loads(await asyncio.wait_for(ws.recv(), WAIT_TIMEOUT_S))["type"] for _ in range(3)]
        assert kinds == ["observation", "state", "observation"]


async def test_single_thread_environment_is_called_from_one_thread() -> None:
    class Single(BlockingCounter):
        REQUIRES_SINGLE_THREAD_EXECUTOR = True

    async with serving(app_of(Single)) as address, socket_to(address) as ws:
        names = set()
        for _ in range(4):
            await ask(ws, step(1))
            names.add((await ask(ws, STATE))["data"]["thread"])
        assert len(names) == 1


# Sessions that stand by themselves


@EVERY_WAY
async def test_standing_session_outlives_its_sockets_one_at_a_time(env: type[Counter]) -> None:
    app = app_of(env)
    async with serving(app) as address:
        session = await open_session(address)
        assert UUID(session).version == 4
        query = f"?session_id={session}"
        async with socket_to(address, query) as ws:
            await ask(ws, {"type": "reset", "data": {"seed": 3}})
            async with socket_to(address, query) as second:
                assert await first_of(second) == {
                    "message": f"Session {session} already has an attached WebSocket",
                    "code": "SESSION_ERROR",
                }
                assert await wait_close_code(second) == 1000
            assert (await ask(ws, step()))["data"]["observation"]["total"] == 5
        async with socket_to(address, query) as ws:
            assert (await ask(ws, step()))["data"]["observation"]["total"] == 7
            await ws.send('{"type":"close"}')
            assert await wait_close_code(ws) == 1000
        async with socket_to(address, query) as ws:
            assert (await ask(ws, step()))["data"]["observation"]["total"] == 9
            ws.transport.abort()
        await eventually(lambda: not app.sessions.find("", session).attachment)
        assert app.sessions.active == 1
        reply = await rpc(address, "openenv/session/close", {"session_id": session})
        assert reply["result"] == {"session_id": session, "closed": True}
        assert app.sessions.active == 0
        assert not app.sessions._sessions
        async with socket_to(address, query) as ws:
            assert await first_of(ws) == {
                "message": f"Unknown session_id: {session}",
                "code": "SESSION_ERROR",
            }
            assert await wait_close_code(ws) == 1000


async def test_session_that_is_still_initializing_is_reported() -> None:
    env = SlowConstructor.fresh()
    async with serving(app_of(env)) as address:
        opening = asyncio.create_task(request(address, "POST", "/reset", {}, {HEADER: "mine"}))
        await eventually(env.entered.is_set)
        async with socket_to(address, "?session_id=mine") as ws:
            assert (await first_of(ws))["message"].startswith("Session mine is still initializing")
        env.release.set()
        assert (await opening).status_code == 200
        async with socket_to(address, "?session_id=mine") as ws:
            assert (await ask(ws, STATE))["type"] == "state"


async def test_closing_while_attached_waits_for_the_socket() -> None:
    app = app_of(Counter)
    async with serving(app) as address:
        session = await open_session(address)
        async with socket_to(address, f"?session_id={session}") as ws:
            await ask(ws, RESET)
            for _ in range(2):
                reply = await rpc(address, "openenv/session/close", {"session_id": session})
                assert reply["result"] == {"session_id": session, "closed": False, "closing": True}
            assert (await ask(ws, step()))["type"] == "observation"
        await eventually(lambda: app.sessions.active == 0)
        reply = await rpc(address, "openenv/session/close", {"session_id": session})
        assert reply["error"] == {"code": -32602, "message": f"Unknown session_id: {session}", "data": None}


@EVERY_WAY
async def test_create_inside_a_socket_returns_its_own_session(env: type[Counter]) -> None:
    app = app_of(env)
    async with serving(app) as address, socket_to(address) as ws:

        async def call(method: str, **params: Any) -> Any:
            return (await ask(ws, {"type": "mcp", "data": mcp(method, **params)}))["data"]

        await ask(ws, {"type": "reset", "data": {"seed": 4}})
        session = (await call("openenv/session/create"))["result"]["session_id"]
        assert (await call("openenv/session/create"))["result"]["session_id"] == session
        assert app.sessions.active == 1
        # Others find it by that id, and take turns with the socket.
        reply = await request(address, "POST", "/step", action(), {HEADER: session})
        assert reply.json()["observation"]["total"] == 6
        assert (await ask(ws, step()))["data"]["observation"]["total"] == 8
        async with socket_to(address, f"?session_id={session}") as second:
            assert "already has an attached" in (await first_of(second))["message"]
        assert (await call("openenv/session/close", session_id=session))["error"]["code"] == -32600
        reply = await rpc(address, "openenv/session/close", {"session_id": session})
        assert reply["result"] == {"session_id": session, "closed": False, "closing": True}
        ws.transport.abort()
        await eventually(lambda: app.sessions.active == 0)
        assert (await rpc(address, "tools/list", {"session_id": session}))["error"]["code"] == -32602


async def test_step_of_a_standing_session_continues_when_its_socket_breaks() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env)
    async with serving(app) as address:
        session = await open_session(address)
        async with socket_to(address, f"?session_id={session}") as ws:
            await start_step(ws, env)
            ws.transport.abort()
        await eventually(lambda: not app.sessions.find("", session).attachment)
        async with socket_to(address, f"?session_id={session}") as ws:
            await ws.send('{"type":"state"}')  # waits for its turn
            env.release.set()
            assert json.loads(await ws.recv())["type"] == "state"
        assert (env.stepping, env.closed, app.sessions.active) == (0, 0, 1)


async def test_step_on_the_loop_waits_for_a_tool_call_of_another_client() -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    class Tooled(Counter):
        def list_tools(self) -> list[Any]:
            return []

        async def call_tool(self, name: str, arguments: Any, context: Any) -> ToolResult:
            entered.set()
            await release.wait()
            return ToolResult.of(self.state.total)

    app = app_of(Tooled)
    async with serving(app) as address:
        session = await open_session(address)
        async with socket_to(address, f"?session_id={session}") as ws:
            call = asyncio.create_task(rpc(address, "tools/call", {"name": "total", "session_id": session}))
            await entered.wait()
            await ws.send(json.dumps(step()))
            await eventually(lambda: app.sessions.find("", session).waiting_calls == 1)
            release.set()
            assert (await call)["result"]["data"] == 0
            assert json.loads(await ws.recv())["data"]["observation"]["total"] == 2
        # One that leaves while its step waits is seen to leave, and the step is not taken for nobody.
        entered.clear(), release.clear()
        async with socket_to(address, f"?session_id={session}") as ws:
            call = asyncio.create_task(rpc(address, "tools/call", {"name": "total", "session_id": session}))
            await entered.wait()
            await ws.send(json.dumps(step()))
            await eventually(lambda: app.sessions.find("", session).waiting_calls == 1)
        await eventually(lambda: not app.sessions.find("", session).attachment)
        release.set()
        assert (await call)["result"]["data"] == 2
        async with socket_to(address, f"?session_id={session}") as ws:
            await ws.send(json.dumps(STATE))
            assert json.loads(await ws.recv())["data"]["total"] == 2


def test_nested_union_in_an_action_is_a_validation_error() -> None:
    class Left(BaseModel):
        side: Literal["left"] = "left"

    class Right(BaseModel):
        side: Literal["right"] = "right"

    class Turn(Action):
        to: Annotated[Left | Right, Field(discriminator="side")]

    for to in ({}, {"side": "up"}):
        with pytest.raises(RefusalError) as refused:
            RequestDecoder(Turn).frame(json.dumps({"type": "step", "data": {"to": to}}))
        assert refused.value.code == "VALIDATION_ERROR"
        assert refused.value.extra["errors"][0]["loc"] == ["to"]
