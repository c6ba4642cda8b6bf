import asyncio
import json
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from counter import (
    Add,
    Awkward,
    Count,
    Counter,
    CountState,
    ReleasedCounter,
    SlowAsync,
    SlowConstructor,
    Unbuildable,
)
from serving import eventually, serving, socket_to

from openenv_core import ConfigurationError, EnvironmentMetadata, Observation
from servers import create_app
from servers.app import EnvironmentApp


def app_of(env: Any, **options: Any) -> EnvironmentApp:
    return create_app(env, Add, Count, **{"max_concurrent_envs": 4, **options})


async def call(address: str, method: str, path: str, body: Any = None) -> httpx.Response:
    content = body if body is None or isinstance(body, str) else json.dumps(body)
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=20) as http:
        return await http.request(method, path, content=content, headers=headers)


@pytest.mark.parametrize("body", [None, {}, {"seed": 2, "start": 1, "unknown": 1}])
async def test_reset(body: Any) -> None:
    async with serving(app_of(Counter)) as address:
        reply = await call(address, "POST", "/reset", body)
        assert reply.status_code == 200
        assert reply.json() == {
            "observation": {"metadata": {}, "total": 3 if body else 0, "extra": None},
            "reward": None,
            "done": False,
            "metadata": None,
        }


async def test_step_takes_an_environment_of_its_own() -> None:
    async with serving(app_of(Counter)) as address:
        for _ in range(2):
            reply = await call(address, "POST", "/step", {"action": {"amount": 2}, "unknown": 1})
            assert reply.json()["observation"]["total"] == 2
            assert isinstance(reply.json()["reward"], float)
        assert (await call(address, "GET", "/state")).json()["total"] == 0


async def test_step_passes_its_options_on() -> None:
    async with serving(app_of(ReleasedCounter)) as address:
        body = {"action": {"amount": 2}, "timeout_s": 1.5, "request_id": "r", "more": 1}
        reply = await call(address, "POST", "/step", body)
        assert reply.json()["metadata"] == {"timeout_s": 1.5, "options": ["more", "request_id"]}


@pytest.mark.parametrize(
    ("path", "body", "kind", "loc"),
    [
        ("/reset", {"seed": -1}, "greater_than_equal", ["body", "seed"]),
        ("/reset", '{"seed": NaN}', "json_invalid", ["body", 10]),
        ("/reset", {"episode_id": "x" * 256}, "string_too_long", ["body", "episode_id"]),
        ("/reset", "{", "json_invalid", ["body", 1]),
        ("/reset", [1], "model_attributes_type", ["body"]),
        ("/step", {}, "missing", ["body", "action"]),
        ("/step", {"action": {"amount": 1}, "timeout_s": 0}, "greater_than", ["body", "timeout_s"]),
        ("/step", {"action": {}}, "missing", ["amount"]),
        ("/step", {"action": {"amount": 13}}, "value_error", ["amount"]),
    ],
)
async def test_bad_requests(path: str, body: Any, kind: str, loc: list[str]) -> None:
    async with serving(app_of(Counter)) as address:
        reply = await call(address, "POST", path, body)
        assert reply.status_code == 422
        fault = reply.json()["detail"][0]
        assert fault["loc"] == loc
        assert fault["type"] == kind


async def test_failures_of_the_environment_are_500_without_a_traceback() -> None:
    async with serving(app_of(Awkward)) as address:
        for amount, text in [(3, "out of here"), (9, "ValueError"), (4, "got NoneType")]:
            reply = await call(address, "POST", "/step", {"action": {"amount": amount}})
            assert reply.status_code == 500
            assert text in reply.json()["detail"]
            assert "Traceback" not in reply.text
        reply = await call(address, "POST", "/step", {"action": {"amount": 0}})
        assert (reply.status_code, reply.json()["reward"]) == (200, None)
    async with serving(app_of(Unbuildable)) as address:
        reply = await call(address, "POST", "/reset")
        assert (reply.status_code, reply.json()["detail"]["code"]) == (500, "FACTORY_ERROR")


async def test_requests_count_against_the_cap() -> None:
    app = app_of(Counter, max_concurrent_envs=1)
    async with serving(app) as address:
        async with socket_to(address) as ws:
            await ws.send('{"type":"state"}')
            await ws.recv()
            reply = await call(address, "POST", "/reset")
            assert reply.status_code == 503
            assert reply.headers["retry-after"]
            assert reply.json()["detail"]["code"] == "CAPACITY_REACHED"
        await eventually(lambda: app.state.sessions.active == 0)
        assert (await call(address, "POST", "/reset")).status_code == 200
        assert app.state.sessions.active == 0


async def test_a_client_that_leaves_frees_its_slot() -> None:
    env = SlowAsync.fresh()
    app = app_of(env, max_concurrent_envs=1)
    async with serving(app) as address:
        request = asyncio.create_task(call(address, "POST", "/step", {"action": {"amount": 1}}))
        await eventually(env.entered.is_set)
        request.cancel()
        await eventually(lambda: app.state.sessions.active == 0)
        assert (env.stepping, env.closed) == (0, 1)


async def test_a_slow_constructor_does_not_hold_up_the_others() -> None:
    env = SlowConstructor.fresh()
    async with serving(app_of(env)) as address:
        request = asyncio.create_task(call(address, "POST", "/reset"))
        await eventually(env.entered.is_set)
        assert (await call(address, "GET", "/health")).json() == {"status": "healthy"}
        assert not request.done()
        env.release.set()
        assert (await request).status_code == 200


async def test_what_a_server_tells_of_itself() -> None:
    app = app_of(Counter, env_name="counter", state_cls=CountState)
    async with serving(app) as address:
        assert (await call(address, "GET", "/metadata")).json() == {
            "name": "counter",
            "description": "Counts up to a limit.",
            "readme_content": None,
            "version": None,
            "author": None,
            "documentation_url": None,
        }
        schema = (await call(address, "GET", "/schema")).json()
        assert set(schema) == {"action", "observation", "state", "reset_observation"}
        assert schema["reset_observation"] == schema["observation"]
        assert schema["action"]["required"] == ["amount"]
        assert "thread" in schema["state"]["properties"]
        assert (await call(address, "GET", "/openapi.json")).json()["info"]["version"].startswith("1.")
        assert (await call(address, "GET", "/docs")).status_code == 200
        assert (await call(address, "GET", "/nowhere")).status_code == 404


async def test_metadata_of_the_environments_own() -> None:
    class Described(Counter):
        calls = 0

        def get_metadata(self) -> EnvironmentMetadata:
            Described.calls += 1
            return EnvironmentMetadata(name="own", description="of its own")

    async with serving(app_of(Described)) as address:
        for _ in range(2):
            assert (await call(address, "GET", "/metadata")).json()["name"] == "own"
    assert Described.calls == 1


async def test_schema_of_fields_that_json_schema_lacks() -> None:
    class Picture(Observation):
        pixels: np.ndarray

    async with serving(create_app(Counter, Add, Picture)) as address:
        schema = (await call(address, "GET", "/schema")).json()
        assert schema["observation"]["properties"]["pixels"] is not None


def test_the_cap_has_to_make_sense() -> None:
    class Solitary(Counter):
        SUPPORTS_CONCURRENT_SESSIONS = False

    with pytest.raises(ConfigurationError, match="SUPPORTS_CONCURRENT_SESSIONS = True"):
        app_of(Solitary, max_concurrent_envs=2)
    with pytest.raises(ConfigurationError, match="at least 1"):
        app_of(Counter, max_concurrent_envs=0)
    app_of(Solitary, max_concurrent_envs=1)


async def test_a_factory_that_is_a_function() -> None:
    threads: list[str] = []

    def make() -> Counter:
        """Make a counter."""
        threads.append(threading.current_thread().name)
        return Counter()

    async with serving(app_of(make)) as address:
        assert (await call(address, "POST", "/reset")).status_code == 200
        assert (await call(address, "GET", "/metadata")).json()["name"] == "Counter"
    assert all(name.startswith("environment") for name in threads)


async def test_a_function_cannot_bring_what_must_be_alone() -> None:
    class Solitary(Counter):
        SUPPORTS_CONCURRENT_SESSIONS = False

    app = app_of(lambda: Solitary())
    async with serving(app) as address:
        reply = await call(address, "POST", "/reset")
        assert reply.json()["detail"]["code"] == "FACTORY_ERROR"
        assert "SUPPORTS_CONCURRENT_SESSIONS = True" in reply.text
        assert app.state.sessions.active == 0
