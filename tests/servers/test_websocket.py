import asyncio
import json
from typing import Annotated, Any, Literal

import pytest
from counter import (
    Add,
    AsyncCounter,
    Awkward,
    BlockingCounter,
    Count,
    Counter,
    ReleasedCounter,
    Slow,
    SlowAsync,
    SlowBlocking,
    SlowConstructor,
    SlowSolitary,
    Unbuildable,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from serving import ask, eventually, serving, socket_to
from websockets.exceptions import ConnectionClosedOK

from openenv_core import Action
from openenv_core.protocol.codes import Refusal
from openenv_core.protocol.requests import RequestDecoder
from servers import create_app
from servers.app import EnvironmentApp

EVERY_WAY = pytest.mark.parametrize("env", [Counter, BlockingCounter, AsyncCounter], ids=lambda e: e.__name__)
STEP = {"type": "step", "data": {"amount": 2}}


def app_of(env: Any, cap: int = 4) -> EnvironmentApp:
    return create_app(env, Add, Count, max_concurrent_envs=cap)


def sessions(app: EnvironmentApp) -> Any:
    return app.state.sessions


@EVERY_WAY
async def test_an_episode(env: type[Counter]) -> None:
    async with serving(app_of(env)) as address, socket_to(address) as ws:
        # A session is there from the start: no reset is needed.
        assert await ask(ws, {"type": "state"}) == {
            "type": "state",
            "data": {"episode_id": None, "step_count": 0, "total": 0, "thread": ""},
        }
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
        reply = await ask(ws, STEP)
        assert reply["data"]["observation"]["total"] == 6
        assert (reply["data"]["reward"], reply["data"]["done"]) == (1, False)
        state = (await ask(ws, {"type": "state"}))["data"]
        assert (state["episode_id"], state["step_count"], state["total"]) == ("e", 1, 6)
        assert state["thread"].startswith("environment" if env is BlockingCounter else "MainThread")
        assert (await ask(ws, {"type": "step", "data": {"amount": 9}}))["data"]["done"] is True
        over = await ask(ws, STEP)
        assert over["data"]["code"] == "EXECUTION_ERROR"
        assert "call reset()" in over["data"]["message"]
        assert (await ask(ws, {"type": "reset"}))["data"]["observation"]["total"] == 0
        await ws.send('{"type":"close"}')
        with pytest.raises(ConnectionClosedOK) as closed:
            await ws.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000


async def test_released_async_methods_go_first_and_get_their_options() -> None:
    async with serving(app_of(ReleasedCounter)) as address, socket_to(address) as ws:
        reply = await ask(ws, {"type": "reset", "data": {"seed": 5, "natural": True}})
        assert reply["data"]["observation"]["total"] == 5
        assert (
            reply["data"]["metadata"] == reply["data"]["observation"]["metadata"] == {"options": ["natural"]}
        )
        assert (await ask(ws, STEP))["data"]["observation"]["total"] == 2


@pytest.mark.parametrize(
    ("frame", "code", "places"),
    [
        ("{", "INVALID_JSON", None),
        ("", "INVALID_JSON", None),
        ("[" * 100_000, "INVALID_JSON", None),
        (b"\x00\x01", "INVALID_JSON", None),
        (b'{"type":"state"}', "INVALID_JSON", None),
        ("[1]", "VALIDATION_ERROR", [[]]),
        ("null", "VALIDATION_ERROR", [[]]),
        ({}, "UNKNOWN_TYPE", None),
        ({"type": "stop"}, "UNKNOWN_TYPE", None),
        ({"type": 5}, "UNKNOWN_TYPE", None),
        ({"type": "step"}, "VALIDATION_ERROR", [["data"]]),
        ({"type": "step", "data": 3}, "VALIDATION_ERROR", [["data"]]),
        ({"type": "step", "data": {}}, "VALIDATION_ERROR", [["amount"]]),
        ({"type": "step", "data": {"amount": "x"}}, "VALIDATION_ERROR", [["amount"]]),
        ({"type": "step", "data": {"amount": 1, "more": 1}}, "VALIDATION_ERROR", [["more"]]),
        ({"type": "step", "data": {"amount": 1}, "more": 1}, "VALIDATION_ERROR", [["more"]]),
        ({"type": "step", "data": {"amount": 13}}, "VALIDATION_ERROR", [["amount"]]),
        ({"type": "reset", "data": {"seed": -7}}, "VALIDATION_ERROR", [["seed"]]),
        ({"type": "reset", "data": {"seed": "abc"}}, "VALIDATION_ERROR", [["seed"]]),
        ({"type": "reset", "data": {"episode_id": "x" * 256}}, "VALIDATION_ERROR", [["episode_id"]]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("env", [Counter, AsyncCounter], ids=lambda e: e.__name__)
async def test_bad_frames_are_refused_and_the_session_lives(
    env: type[Counter], frame: Any, code: str, places: list[list[str]] | None
) -> None:
    async with serving(app_of(env)) as address, socket_to(address) as ws:
        await ask(ws, {"type": "reset", "data": {"seed": 1}})
        data = (await ask(ws, frame))["data"]
        assert data["code"] == code
        if places is not None:
            assert data["message"] == "Invalid message"
            assert [fault["loc"] for fault in data["errors"]] == places
        assert (await ask(ws, STEP))["data"]["observation"]["total"] == 3


async def test_mcp_frames_are_answered_in_json_rpc() -> None:
    async with serving(app_of(Counter)) as address, socket_to(address) as ws:
        reply = await ask(ws, {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 7, "method": "tools/list"}})
        assert reply["type"] == "mcp"
        assert reply["data"]["id"] == 7
        assert reply["data"]["error"]["code"] == -32603
        assert reply["data"]["error"]["data"] is None


async def test_values_that_json_lacks() -> None:
    async def step(amount: int) -> Any:
        return (await ask(ws, {"type": "step", "data": {"amount": amount}}))["data"]

    async with serving(app_of(Awkward)) as address, socket_to(address) as ws:
        nans = await step(0)
        assert nans["reward"] is None
        assert nans["observation"]["extra"] == {"nan": None, "inf": [None, None]}
        assert (await step(1))["observation"]["extra"] == {
            "array": [[0, 1], [2, 3]],
            "scalar": 1.5,
            "bytes": "_w==",
        }
        numbers = await step(2)
        assert numbers["reward"] == 0.5
        assert numbers["metadata"] == {"flag": True, "nan": [None]}
        kept = await step(8)
        assert kept["reward"] is True
        assert kept["metadata"] == kept["observation"]["metadata"] == {"why": "because"}
        for amount, text in [
            (3, "out of here"),
            (4, "got NoneType"),
            (5, "got object"),
            (6, "lone surrogate ?"),
            (7, ""),
            (9, "ValueError"),
            (10, "got builtin_function_or_method"),
        ]:
            failure = await step(amount)
            assert failure["code"] == "EXECUTION_ERROR"
            assert text in failure["message"]
        assert (await step(8))["reward"] is True


@EVERY_WAY
async def test_capacity_is_refused_at_connect_and_slots_come_back(env: type[Counter]) -> None:
    app = app_of(env, cap=1)
    async with serving(app) as address:
        async with socket_to(address) as ws:
            await ask(ws, {"type": "reset"})
            async with socket_to(address) as second:
                frame = json.loads(await second.recv())
                assert frame["data"]["code"] == "CAPACITY_REACHED"
                assert (frame["data"]["active_sessions"], frame["data"]["max_sessions"]) == (1, 1)
                with pytest.raises(ConnectionClosedOK):
                    await second.recv()
            assert (await ask(ws, STEP))["type"] == "observation"
        await eventually(lambda: sessions(app).active == 0)
        async with socket_to(address) as ws:
            assert (await ask(ws, {"type": "reset"}))["type"] == "observation"


async def test_a_constructor_that_raises() -> None:
    app = app_of(Unbuildable)
    async with serving(app) as address, socket_to(address) as ws:
        frame = json.loads(await ws.recv())
        assert frame["data"] == {
            "message": "no such counter",
            "code": "FACTORY_ERROR",
            "factory_name": "Unbuildable",
        }
        with pytest.raises(ConnectionClosedOK):
            await ws.recv()
        assert sessions(app).active == 0


async def test_an_unknown_session_id_is_refused() -> None:
    async with serving(app_of(Counter)) as address, socket_to(address, "?session_id=abc") as ws:
        frame = json.loads(await ws.recv())
        assert frame["data"] == {"message": "Unknown session_id: abc", "code": "SESSION_ERROR"}


async def test_a_client_that_leaves_in_an_async_step_frees_its_slot() -> None:
    env = SlowAsync.fresh()
    app = app_of(env, cap=1)
    async with serving(app) as address:
        async with socket_to(address) as ws:
            await ws.send(json.dumps(STEP))
            await eventually(env.entered.is_set)
            ws.transport.abort()
        await eventually(lambda: sessions(app).active == 0)
        assert (env.stepping, env.closed) == (0, 1)


async def test_a_client_that_leaves_in_a_blocking_step_frees_its_slot() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env, cap=1)
    table = sessions(app)
    async with serving(app) as address:
        async with socket_to(address) as ws:
            await ws.send(json.dumps(STEP))
            await eventually(env.entered.is_set)
            ws.transport.abort()
        await eventually(lambda: table.active == 0)
        assert (env.stepping, env.closed, table.executor.abandoned) == (1, 0, 1)
        async with socket_to(address) as ws:
            assert (await ask(ws, {"type": "reset"}))["type"] == "observation"
        env.release.set()
        await eventually(lambda: env.closed == 2)
        assert (env.stepping, table.executor.abandoned) == (0, 0)


async def test_abandoned_steps_are_bounded() -> None:
    env = SlowBlocking.fresh()
    app = app_of(env, cap=1)
    table = sessions(app)
    async with serving(app) as address:
        for number in range(1, table.executor.limit + 1):
            async with socket_to(address) as ws:
                await ws.send(json.dumps(STEP))
                await eventually(lambda number=number: env.stepping == number)
                ws.transport.abort()
            await eventually(lambda: table.active == 0)
        async with socket_to(address) as ws:
            frame = json.loads(await ws.recv())
            assert frame["data"]["code"] == "CAPACITY_REACHED"
            assert "held by calls whose clients have left" in frame["data"]["message"]
        env.release.set()
        await eventually(lambda: table.executor.abandoned == 0)
        async with socket_to(address) as ws:
            assert (await ask(ws, {"type": "reset"}))["type"] == "observation"


async def test_a_class_that_must_be_alone_keeps_its_slot_until_the_step_ends() -> None:
    env = SlowSolitary.fresh()
    app = app_of(env, cap=1)
    table = sessions(app)
    async with serving(app) as address:
        async with socket_to(address) as ws:
            await ws.send(json.dumps(STEP))
            await eventually(env.entered.is_set)
            ws.transport.abort()
        await eventually(lambda: table.executor.abandoned == 1)
        assert table.active == 1
        env.release.set()
        await eventually(lambda: table.active == 0)
        assert env.closed == 1


async def test_a_client_that_leaves_during_construction() -> None:
    env = SlowConstructor.fresh()
    app = app_of(env, cap=1)
    table = sessions(app)
    async with serving(app) as address:
        async with socket_to(address) as ws:
            await eventually(env.entered.is_set)
            ws.transport.abort()
        await eventually(lambda: table.active == 0)
        assert table.executor.abandoned == 1
        env.release.set()
        await eventually(lambda: env.closed == 1)
        assert table.executor.abandoned == 0


async def test_too_many_requests_ahead_end_the_session() -> None:
    env = SlowAsync.fresh()
    app = app_of(env)
    async with serving(app) as address, socket_to(address) as ws:
        for _ in range(64):
            await ws.send(json.dumps(STEP))
        frame = json.loads(await ws.recv())
        assert frame["data"]["code"] == "SESSION_ERROR"
        await eventually(lambda: sessions(app).active == 0)


async def test_a_cancellation_of_the_environments_own_is_its_error() -> None:
    class Cancelled(AsyncCounter):
        async def step(self, action: Add) -> Count:
            raise asyncio.CancelledError

    async with serving(app_of(Cancelled)) as address, socket_to(address) as ws:
        assert (await ask(ws, STEP))["data"]["code"] == "EXECUTION_ERROR"
        assert (await ask(ws, {"type": "reset"}))["type"] == "observation"


async def test_every_call_of_a_single_thread_environment_comes_from_one_thread() -> None:
    class Single(BlockingCounter):
        REQUIRES_SINGLE_THREAD_EXECUTOR = True

    async with serving(app_of(Single)) as address, socket_to(address) as ws:
        names = set()
        for _ in range(4):
            await ask(ws, {"type": "step", "data": {"amount": 1}})
            names.add((await ask(ws, {"type": "state"}))["data"]["thread"])
        assert len(names) == 1


async def test_stopping_the_server_does_not_wait_for_a_hung_step() -> None:
    env: type[Slow] = SlowBlocking.fresh()
    async with serving(app_of(env)) as address, socket_to(address) as ws:
        await ws.send(json.dumps(STEP))
        await eventually(env.entered.is_set)
    assert env.stepping == 1
    env.release.set()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FRAMES = JSON | st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["reset", "step", "state", "mcp", "close"]) | JSON, "data": JSON}
)


@given(FRAMES.map(json.dumps) | st.text())
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_the_decoder_reads_or_refuses(text: str) -> None:
    decoder = RequestDecoder(Add)
    try:
        decoder.frame(text)
    except Refusal as refusal:
        json.dumps(refusal.extra)


def test_a_union_within_an_action_is_no_type_of_frame() -> None:
    class Left(BaseModel):
        side: Literal["left"] = "left"

    class Right(BaseModel):
        side: Literal["right"] = "right"

    class Turn(Action):
        to: Annotated[Left | Right, Field(discriminator="side")]

    for to in ({}, {"side": "up"}):
        with pytest.raises(Refusal) as refused:
            RequestDecoder(Turn).frame(json.dumps({"type": "step", "data": {"to": to}}))
        assert refused.value.code == "VALIDATION_ERROR"
        assert refused.value.extra["errors"][0]["loc"] == ["to"]


async def test_no_frame_kills_a_session() -> None:
    frames: list[str | bytes] = []

    @given(
        FRAMES.filter(lambda f: not (isinstance(f, dict) and f.get("type") == "close")).map(json.dumps)
        | st.binary()
    )
    @settings(max_examples=200, database=None)
    def gather(frame: str | bytes) -> None:
        frames.append(frame)

    gather()
    async with serving(app_of(Counter)) as address, socket_to(address) as ws:
        for frame in frames:
            assert (await ask(ws, frame))["type"] in ("error", "observation", "state", "mcp")
        assert (await ask(ws, {"type": "reset"}))["type"] == "observation"
