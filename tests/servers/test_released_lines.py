"""Every line that was recorded of the released server's plain HTTP routes and of its socket, asked of ours."""

import asyncio
import json
import math
from typing import Any

import pytest
from pydantic import BaseModel
from serving import ask, closing_of, eventually, opened, request, rpc, serving, socket_to
from websockets.exceptions import ConnectionClosed

from openenv_core import Action, Environment, EnvironmentMetadata, Observation, State
from servers import create_app
from servers.app import EnvironmentApp

SESSION = "X-OpenEnv-Session"
MB = 1 << 20


class Message(Action):
    message: str


class Echoed(Observation):
    echoed: str
    step: int = 0


class MiniState(State):
    last: str = ""


class Mini(Environment[Message, Echoed, MiniState]):
    """Echoes."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = MiniState()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, greeting: str = "ready", **kwargs: Any
    ) -> Echoed:
        self._state = MiniState(episode_id=episode_id)
        metadata = {"seed": seed} if seed is not None else {}
        return Echoed(echoed=greeting, metadata=metadata | kwargs)

    def step(self, action: Message, timeout_s: float | None = None, loud: bool = False) -> Echoed:
        if action.message == "boom":
            raise RuntimeError("the bell broke")
        self._state.step_count += 1
        self._state.last = action.message
        reward: Any = {"nan": math.nan, "inf": -math.inf, "true": True, "none": None}.get(action.message, 1)
        metadata = {"timeout_s": timeout_s} if timeout_s is not None else {}
        text = action.message.upper() if loud else action.message
        return Echoed(echoed=text, step=self._state.step_count, reward=reward, metadata=metadata)

    @property
    def state(self) -> MiniState:
        return self._state


class Split(BaseModel):
    name: str
    type: str


class Tasked(Mini):
    def list_splits(self) -> list[Any]:
        return [
            Split(name="own", type="test"),
            {"name": "as a dict", "type": "train"},
            "train",
            "test",
            "other",
        ]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"id": number, "split": split} for number in range(4)]

    def num_tasks(self, split: str) -> int:
        return 4

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        return self.list_tasks(split)[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        return self.list_tasks(split)[start:stop]


class Unbuildable(Mini):
    def __init__(self) -> None:
        raise RuntimeError("no clay")


def app_of(env: type[Mini] = Mini, cap: int = 4, **options: Any) -> EnvironmentApp:
    return create_app(
        env, Message, Echoed, env_name="mini", max_concurrent_envs=cap, state_cls=MiniState, **options
    )


READY = {
    "observation": {"metadata": {}, "echoed": "ready", "step": 0},
    "reward": None,
    "done": False,
    "metadata": None,
}


# Section 2: plain HTTP


async def test_post_reset() -> None:
    async with serving(app_of()) as address:
        for body in ({}, None, "", {"nobody": "takes this"}):
            reply = await request(address, "POST", "/reset", body)
            assert reply.status_code == 200
            if not isinstance(body, dict) or not body:
                assert reply.json() == READY
        options = {"seed": 0, "episode_id": "e" * 255, "greeting": "hello", "extra": [1]}
        reply = (await request(address, "POST", "/reset", options)).json()
        assert reply["observation"]["echoed"] == "hello"
        # Twice: inside the observation, and beside it.
        assert reply["metadata"] == reply["observation"]["metadata"] == {"seed": 0, "extra": [1]}


BAD_RESETS: list[tuple[Any, ...]] = [
    ({"seed": -1}, "greater_than_equal", ["body", "seed"]),
    ({"seed": "abc"}, "int_parsing", ["body", "seed"]),
    ({"episode_id": "e" * 256}, "string_too_long", ["body", "episode_id"]),
    ("[]", "model_attributes_type", ["body"]),
]


async def test_post_reset_refuses() -> None:
    async with serving(app_of()) as address:
        for body, kind, loc in BAD_RESETS:
            reply = await request(address, "POST", "/reset", body)
            assert reply.status_code == 422
            fault = reply.json()["detail"][0]
            assert (fault["type"], fault["loc"]) == (kind, loc)


async def test_post_step() -> None:
    async with serving(app_of()) as address:
        reply = await request(address, "POST", "/step", {"action": {"message": "hi"}})
        assert reply.status_code == 200
        assert reply.json() == {
            "observation": {"metadata": {}, "echoed": "hi", "step": 1},
            "reward": 1.0,
            "done": False,
            "metadata": None,
        }
        body = {"action": {"message": "hi"}, "timeout_s": 2.5, "request_id": "r" * 255, "loud": True, "x": 1}
        reply = await request(address, "POST", "/step", body)
        assert reply.json()["observation"]["echoed"] == "HI"
        assert reply.json()["metadata"] == reply.json()["observation"]["metadata"] == {"timeout_s": 2.5}


async def test_over_http_a_reward_is_a_float_and_what_is_no_number_null() -> None:
    async with serving(app_of()) as address:
        for message, text in (
            ("one", '"reward":1.0'),
            ("true", '"reward":1.0'),
            ("nan", '"reward":null'),
            ("inf", '"reward":null'),
            ("none", '"reward":null'),
        ):
            reply = await request(address, "POST", "/step", {"action": {"message": message}})
            assert text in reply.text


BAD_STEPS: list[tuple[Any, ...]] = [
    # Faults of the action are placed inside the action.
    ({"action": {"wrong": "hi"}}, "missing", ["message"]),
    ({"action": {"message": "hi", "wrong": 1}}, "extra_forbidden", ["wrong"]),
    ({}, "missing", ["body", "action"]),
    ({"action": 3}, "dict_type", ["body", "action"]),
    ({"action": {"message": "a"}, "timeout_s": 0}, "greater_than", ["body", "timeout_s"]),
    ({"action": {"message": "a"}, "request_id": "r" * 256}, "string_too_long", ["body", "request_id"]),
]


async def test_post_step_refuses() -> None:
    async with serving(app_of()) as address:
        for body, kind, loc in BAD_STEPS:
            reply = await request(address, "POST", "/step", body)
            assert reply.status_code == 422
            fault = reply.json()["detail"][0]
            assert (fault["type"], fault["loc"]) == (kind, loc)


async def test_post_step_of_an_environment_that_raises() -> None:
    async with serving(app_of()) as address:
        reply = await request(address, "POST", "/step", {"action": {"message": "boom"}})
        assert reply.status_code == 500
        assert "Traceback" not in reply.text


async def test_get_state() -> None:
    async with serving(app_of()) as address:
        reply = await request(address, "GET", "/state")
        assert (reply.status_code, reply.json()) == (200, {"episode_id": None, "step_count": 0, "last": ""})


async def test_without_a_session_each_call_stands_alone_and_with_one_they_follow() -> None:
    async with serving(app_of()) as address:
        for _ in range(2):
            reply = await request(address, "POST", "/step", {"action": {"message": "hi"}})
            assert reply.json()["observation"]["step"] == 1
        session = (await request(address, "POST", "/reset", {}, {SESSION: "new"})).headers[SESSION]
        for number in (1, 2):
            reply = await request(address, "POST", "/step", {"action": {"message": "hi"}}, {SESSION: session})
            assert reply.json()["observation"]["step"] == number


async def test_the_oldest_clients_have_one_sticky_instance() -> None:
    async with serving(app_of()) as address:
        cookie = (await request(address, "POST", "/reset", {}, {SESSION: "new"})).headers["set-cookie"]
        headers = {"cookie": cookie.partition(";")[0]}
        # They send the action in an envelope with a whole number of seconds, or by itself.
        body = {"action": {"message": "hi"}, "timeout_s": 15}
        assert (await request(address, "POST", "/step", body, headers)).json()["observation"]["step"] == 1
        reply = await request(address, "POST", "/step", {"message": "hi"}, headers)
        assert reply.json()["observation"]["step"] == 2
        assert (await request(address, "GET", "/state", headers=headers)).json()["step_count"] == 2


async def test_get_health_metadata_schema() -> None:
    async with serving(app_of()) as address:
        reply = await request(address, "GET", "/health")
        assert (reply.status_code, reply.json()) == (200, {"status": "healthy"})
        metadata = (await request(address, "GET", "/metadata")).json()
        assert set(metadata) == set(EnvironmentMetadata.model_fields)
        assert set(metadata) == {
            "name",
            "description",
            "readme_content",
            "version",
            "author",
            "documentation_url",
        }
        assert metadata["name"] == "mini"
        schema = (await request(address, "GET", "/schema")).json()
        assert set(schema) == {"action", "observation", "state", "reset_observation"}
        assert schema["reset_observation"] == schema["observation"]
        assert schema["action"]["required"] == ["message"]
        assert schema["action"]["additionalProperties"] is False
    async with serving(app_of(reset_observation_cls=Observation)) as address:
        schema = (await request(address, "GET", "/schema")).json()
        assert schema["reset_observation"] != schema["observation"]


async def test_post_mcp_answers_200_and_get_405() -> None:
    async with serving(app_of()) as address:
        for body, code in (
            ("{", -32700),
            ("[]", -32700),
            ({}, -32600),
            ({"jsonrpc": "2.0", "method": "x"}, -32601),
        ):
            reply = await request(address, "POST", "/mcp", body)
            assert reply.status_code == 200
            assert reply.json()["error"]["code"] == code
            assert reply.json()["error"]["data"] is None
        assert (await request(address, "GET", "/mcp")).status_code == 405


async def test_the_task_routes() -> None:
    async with serving(app_of(Tasked)) as address:

        async def get(path: str, body: Any = None) -> Any:
            reply = await request(address, "GET" if body is None else "POST", path, body)
            assert reply.status_code == 200
            return reply.json()

        assert await get("/list_environments") == ["mini"]
        assert await get("/mini/splits") == [
            {"name": "own", "type": "test"},
            {"name": "as a dict", "type": "train"},
            {"name": "train", "type": "train"},
            {"name": "test", "type": "test"},
            {"name": "other", "type": "validation"},
        ]
        tasks = [{"id": number, "split": "train"} for number in range(4)]
        # The name is matched in any case.
        assert await get("/MINI/tasks", {"split": "train"}) == {"tasks": tasks, "env_name": "mini"}
        assert await get("/Mini/num_tasks", {"split": "train"}) == {"num_tasks": 4}
        assert await get("/mini/task", {"split": "train", "index": 2}) == {"task": tasks[2]}
        for bounds, found in (({}, tasks), ({"start": 1}, tasks[1:]), ({"start": 1, "stop": 3}, tasks[1:3])):
            assert await get("/mini/task_range", {"split": "train", **bounds}) == {"tasks": found}
        bad = await request(address, "POST", "/mini/task", {"split": "train", "index": 99})
        assert (bad.status_code, bad.json()) == (400, {"detail": "Invalid task index"})


async def test_the_task_routes_of_an_environment_without_and_of_none() -> None:
    async with serving(app_of()) as address:
        reply = await request(address, "GET", "/mini/splits")
        text = "list_splits is not supported for this environment"
        assert (reply.status_code, reply.json()) == (501, {"detail": text})
        reply = await request(address, "GET", "/nope/splits")
        assert (reply.status_code, reply.json()) == (404, {"detail": "unknown environment 'nope'"})
        bodies: dict[str, Any] = {
            "tasks": {"split": "s"},
            "num_tasks": {"split": "s"},
            "task": {"split": "s", "index": 0},
            "task_range": {"split": "s"},
        }
        for route, body in bodies.items():
            assert (await request(address, "POST", f"/mini/{route}", body)).status_code == 501
            assert (await request(address, "POST", f"/nope/{route}", body)).status_code == 404


async def test_the_documents() -> None:
    async with serving(app_of()) as address:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert (await request(address, "GET", path)).status_code == 200
        document = (await request(address, "GET", "/openapi.json")).json()
        assert document["info"]["version"].startswith("1.")


async def test_production_has_no_reset_step_or_state() -> None:
    async with serving(app_of(mode="production")) as address:
        for method, path in (("POST", "/reset"), ("POST", "/step"), ("GET", "/state")):
            assert (await request(address, method, path, {} if method == "POST" else None)).status_code == 404
        for path in ("/health", "/metadata", "/schema", "/list_environments"):
            assert (await request(address, "GET", path)).status_code == 200


# Section 3: the socket


async def test_the_table_of_frames() -> None:
    async with serving(app_of()) as address, socket_to(address) as ws:
        # The session is there from the start.
        state = {"episode_id": None, "step_count": 0, "last": ""}
        assert await ask(ws, {"type": "state"}) == {"type": "state", "data": state}
        reply = await ask(ws, {"type": "step", "data": {"message": "hi"}})
        # The top-level metadata is absent when empty, and the reward keeps its type.
        assert reply == {
            "type": "observation",
            "data": {
                "observation": {"metadata": {}, "echoed": "hi", "step": 1},
                "reward": 1,
                "done": False,
            },
        }
        ready = {key: value for key, value in READY.items() if key != "metadata"}
        assert await ask(ws, {"type": "reset"}) == {"type": "observation", "data": ready}
        assert await ask(ws, {"type": "reset", "data": {}}) == {"type": "observation", "data": ready}
        reply = await ask(ws, {"type": "reset", "data": {"seed": 1, "greeting": "hello", "episode_id": "e"}})
        assert reply["data"]["observation"]["echoed"] == "hello"
        assert reply["data"]["metadata"] == reply["data"]["observation"]["metadata"] == {"seed": 1}
        assert (await ask(ws, {"type": "state"}))["data"]["episode_id"] == "e"
        call = {"jsonrpc": "2.0", "id": 7, "method": "no/such"}
        reply = await ask(ws, {"type": "mcp", "data": call})
        assert reply["type"] == "mcp"
        assert (reply["data"]["id"], reply["data"]["error"]["code"]) == (7, -32601)
        await ws.send('{"type":"close"}')
        assert await closing_of(ws) == 1000  # without a frame before


async def test_over_the_socket_a_reward_keeps_its_type() -> None:
    async with serving(app_of()) as address, socket_to(address) as ws:
        for message, text in (
            ("one", '"reward":1,'),
            ("true", '"reward":true,'),
            ("nan", '"reward":null,'),
            ("inf", '"reward":null,'),
            ("none", '"reward":null,'),
        ):
            await ws.send(json.dumps({"type": "step", "data": {"message": message}}))
            assert text in str(await asyncio.wait_for(ws.recv(), 20))


SURVIVED: list[tuple[Any, ...]] = [
    ("{", "INVALID_JSON"),
    ("hello", "INVALID_JSON"),
    ({"type": "dance"}, "UNKNOWN_TYPE"),
    ({"data": {}}, "UNKNOWN_TYPE"),
    ({"type": "step"}, "VALIDATION_ERROR"),
    ({"type": "step", "data": {"wrong": 1}}, "VALIDATION_ERROR"),
    ({"type": "state", "more": 1}, "VALIDATION_ERROR"),
    ({"type": "reset", "data": {"seed": -7}}, "VALIDATION_ERROR"),
    # What the released /ws does not take: `timeout_s` beside the action.
    ({"type": "step", "data": {"message": "hi"}, "timeout_s": 1}, "VALIDATION_ERROR"),
    ({"type": "step", "data": {"message": "boom"}}, "EXECUTION_ERROR"),
]


async def test_errors_that_the_session_survives() -> None:
    async with serving(app_of()) as address, socket_to(address) as ws:
        await ask(ws, {"type": "step", "data": {"message": "before"}})
        for frame, code in SURVIVED:
            reply = await ask(ws, frame)
            assert reply["type"] == "error"
            assert reply["data"]["code"] == code
            if code == "VALIDATION_ERROR":
                assert reply["data"]["message"] == "Invalid message"
                assert reply["data"]["errors"]
            elif code == "EXECUTION_ERROR":
                assert reply["data"]["message"] == "the bell broke"
            state = {"episode_id": None, "step_count": 1, "last": "before"}
            assert await ask(ws, {"type": "state"}) == {"type": "state", "data": state}


async def test_capacity_reached_is_sent_unprompted_then_the_socket_closes() -> None:
    async with serving(app_of(cap=1)) as address, socket_to(address) as first:
        await ask(first, {"type": "state"})
        async with socket_to(address) as second:
            frame = json.loads(await asyncio.wait_for(second.recv(), 20))
            assert frame["type"] == "error"
            assert frame["data"]["code"] == "CAPACITY_REACHED"
            assert (frame["data"]["active_sessions"], frame["data"]["max_sessions"]) == (1, 1)
            assert await closing_of(second) == 1000


async def test_factory_error_is_sent_unprompted_then_the_socket_closes() -> None:
    async with serving(app_of(Unbuildable)) as address, socket_to(address) as ws:
        frame = json.loads(await asyncio.wait_for(ws.recv(), 20))
        assert frame["data"]["code"] == "FACTORY_ERROR"
        assert frame["data"]["factory_name"] == "Unbuildable"
        assert "no clay" in frame["data"]["message"]
        assert await closing_of(ws) == 1000


async def test_frames_of_up_to_16_mib() -> None:
    async with serving(app_of()) as address:
        async with socket_to(address, max_size=None) as ws:
            reply = await ask(ws, {"type": "step", "data": {"message": "x" * (15 * MB)}})
            assert len(reply["data"]["observation"]["echoed"]) == 15 * MB
        async with socket_to(address) as ws:
            with pytest.raises(ConnectionClosed):
                await ask(ws, "x" * (16 * MB + 1))
            assert ws.close_code == 1009


async def test_attach_to_a_session_made_over_http() -> None:
    app = app_of()
    async with serving(app) as address:
        session = await opened(address)
        async with socket_to(address, f"?session_id={session}") as ws:
            await ask(ws, {"type": "step", "data": {"message": "hi"}})
            async with socket_to(address, f"?session_id={session}") as other:
                frame = json.loads(await asyncio.wait_for(other.recv(), 20))
                assert frame["data"]["code"] == "SESSION_ERROR"
                assert frame["data"]["message"] == f"Session {session} already has an attached WebSocket"
                assert await closing_of(other) == 1000
        await eventually(lambda: not app.sessions.find("", session).attached)
        # A disconnect does not end it.
        async with socket_to(address, f"?session_id={session}") as ws:
            assert (await ask(ws, {"type": "state"}))["data"]["step_count"] == 1
            closed = await rpc(address, "openenv/session/close", {"session_id": session})
            assert closed["result"] == {"session_id": session, "closed": False, "closing": True}
        await eventually(lambda: app.sessions.active == 0)
        async with socket_to(address, "?session_id=nobody") as ws:
            frame = json.loads(await asyncio.wait_for(ws.recv(), 20))
            assert frame["data"] == {"message": "Unknown session_id: nobody", "code": "SESSION_ERROR"}
            assert await closing_of(ws) == 1000
