"""Flaws of the released server, by the numbers of the list that was made of them, each looked for in ours.

Numbers 13 and 17 are of parts that are not here.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
import tomllib
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import psutil
import pytest
from counter import (
    Add,
    AsyncCounter,
    Awkward,
    BlockingCounter,
    Count,
    Counter,
    CountState,
    Slow,
    SlowAsync,
    SlowBlocking,
)
from counter_client import CounterEnv
from packaging.requirements import Requirement
from serve_process import eventually as sync_eventually
from serve_process import refusal, serve
from serving import ask, closing_of, eventually, opened, request, rpc, serving, socket_to
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.extensions.permessage_deflate import ClientPerMessageDeflateFactory

from openenv_core import RequestTimeout
from servers import create_app
from servers.app import EnvironmentApp
from servers.sessions import reaper

ROOT = Path(__file__).parents[2]
MB = 1 << 20
EVERY_WAY = pytest.mark.parametrize("env", [Counter, BlockingCounter, AsyncCounter], ids=lambda e: e.__name__)
STATE = {"type": "state"}
SESSION = "X-OpenEnv-Session"


def app_of(env: Any, cap: int = 4, **settings: Any) -> EnvironmentApp:
    app = create_app(env, Add, Count, env_name="counter", max_concurrent_envs=cap, state_cls=CountState)
    app.configure(replace(app.settings, **settings))
    return app


def step(amount: int) -> dict[str, Any]:
    return {"type": "step", "data": {"amount": amount}}


@EVERY_WAY
async def test_flaw_01_a_validator_that_raises_is_a_validation_error(env: type[Counter]) -> None:
    async with serving(app_of(env)) as address:
        async with socket_to(address) as ws:
            data = (await ask(ws, step(13)))["data"]
            assert (data["code"], data["message"]) == ("VALIDATION_ERROR", "Invalid message")
            assert data["errors"][0]["loc"] == ["amount"]
            assert "thirteen is refused" in data["errors"][0]["msg"]
            assert (await ask(ws, step(2)))["data"]["observation"]["total"] == 2
        reply = await request(address, "POST", "/step", {"action": {"amount": 13}})
        assert reply.status_code == 422
        assert reply.json()["detail"][0]["loc"] == ["amount"]


@EVERY_WAY
async def test_flaw_02_idle_eviction_leaves_who_is_connected_alone(
    env: type[Counter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "MAX_INTERVAL_S", 0.05)  # a lower limit is heeded at once
    app = app_of(env, cap=3, idle_timeout_s=600)
    async with serving(app) as address, socket_to(address) as own:
        attached = await opened(address)
        async with socket_to(address, f"?session_id={attached}") as ws:
            assert (await ask(ws, step(3)))["data"]["observation"]["total"] == 3
            await ask(own, step(4))
            app.sessions._reaper._idle_s = 0.3  # from when both stand, however long that took
            # More than one idle time later: sessions without a socket have come and gone.
            for _ in range(2):
                idle = await opened(address)
                await eventually(lambda: app.sessions.active == 2)
                assert "error" in await rpc(address, "openenv/session/close", {"session_id": idle})
            # Both still count: there is room for one more, and for no second.
            async with socket_to(address) as third, socket_to(address) as fourth:
                assert (await ask(third, STATE))["type"] == "state"
                refused = json.loads(await asyncio.wait_for(fourth.recv(), 20))
                assert refused["data"]["code"] == "CAPACITY_REACHED"
            assert (await ask(ws, step(1)))["data"]["observation"]["total"] == 4
            assert (await ask(own, step(1)))["data"]["observation"]["total"] == 5
        await eventually(lambda: app.sessions.active == 1)  # nobody is attached any more


@pytest.mark.parametrize("kind", [SlowAsync, SlowBlocking])
async def test_flaw_03_a_client_that_leaves_in_mid_step_gives_its_slot_back(kind: type[Slow]) -> None:
    env = kind.fresh()
    app = app_of(env, cap=1)
    async with serving(app) as address:
        async with socket_to(address) as ws:
            await ws.send(json.dumps(step(1)))
            await eventually(env.entered.is_set)
            assert app.sessions.active == 1
        await eventually(lambda: app.sessions.active == 0)
        async with socket_to(address) as ws:  # while the thread of the first, if it had one, hangs
            assert (await ask(ws, STATE))["type"] == "state"
        env.release.set()


@pytest.mark.parametrize("kind", [SlowAsync, SlowBlocking])
async def test_flaw_03_a_step_that_hangs_for_ever_does_not_leak_its_slot(kind: type[Slow]) -> None:
    env = kind.fresh()
    app = app_of(env, cap=1, step_timeout_s=0.2)
    async with serving(app) as address:
        async with socket_to(address) as ws:
            data = (await ask(ws, step(1)))["data"]
            assert data["code"] == "SESSION_ERROR"
            assert await closing_of(ws) == 1000
        async with socket_to(address) as ws:
            assert (await ask(ws, STATE))["type"] == "state"
        env.release.set()


@pytest.mark.slow
def test_flaw_04_sessions_that_were_made_and_left_do_not_fill_the_server_for_ever() -> None:
    create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
    with serve("--max-sessions", "2", "--idle-timeout", "1.5") as server:

        def made() -> bool:
            return "result" in server.request("POST", "/mcp", create)[1]

        assert made()
        assert made()
        error = server.request("POST", "/mcp", create)[1]["error"]
        assert error["code"] == -32000
        assert error["data"] == {"active_sessions": 2, "max_sessions": 2}
        sync_eventually(made)


async def test_flaw_04_one_caller_can_be_kept_from_taking_every_slot() -> None:
    first, second = "the-token-of-the-first", "the-token-of-the-second"
    app = app_of(Counter, cap=3, tokens=(first, second), max_sessions_per_token=2)
    async with serving(app) as address:
        for _ in range(2):
            await opened(address, authorization=f"Bearer {first}")
        refused = await rpc(address, "openenv/session/create", authorization=f"Bearer {first}")
        assert refused["error"]["code"] == -32000
        await opened(address, authorization=f"Bearer {second}")


@EVERY_WAY
async def test_flaw_05_plain_http_does_not_bypass_the_cap(env: type[Counter]) -> None:
    async with serving(app_of(env, cap=1)) as address:
        async with socket_to(address) as ws:
            await ask(ws, STATE)
            for method, path, body, headers in (
                ("POST", "/reset", {}, {}),
                ("POST", "/reset", {}, {SESSION: "new"}),
                ("POST", "/step", {"action": {"amount": 1}}, {}),
                ("GET", "/state", None, {}),
            ):
                reply = await request(address, method, path, body, headers)
                assert reply.status_code == 503
                assert int(reply.headers["retry-after"]) >= 1
        async with asyncio.timeout(20):
            while (await request(address, "POST", "/reset", {})).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def test_flaw_06_health_answers_while_constructors_hang(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with serve(app="gated:app", GATE=str(gate)) as server, ThreadPoolExecutor() as callers:
        reset = callers.submit(server.request, "POST", "/reset", {})
        step = callers.submit(server.request, "POST", "/step", {"action": {"amount": 1}})
        try:
            sync_eventually(lambda: server.output.count("constructing now") == 2)
            assert server.get("/health") == (200, {"status": "healthy"})
            assert server.get("/schema")[0] == 200
            assert not reset.done()
            assert not step.done()
        finally:
            # One that opens the pipe lets all in who read from it, and whoever is not there yet needs another.
            while not (reset.done() and step.done()):
                with open(os.open(gate, os.O_RDWR), "w"):
                    pass
        assert reset.result()[0] == step.result()[0] == 200


@pytest.mark.soak
async def test_flaw_07_a_session_is_found_whichever_worker_a_request_meets() -> None:
    with serve("--workers", "2", "--max-sessions", "64") as server:
        address = server.address
        homes = set()
        for number in range(1, 13):
            session_id = await opened(address)
            homes.add(zlib.crc32(session_id.encode()) % 2)
            # Each of these is a connection of its own.
            for turn in range(1, 4):
                body = {"action": {"amount": 1}}
                reply = await request(address, "POST", "/step", body, {SESSION: session_id})
                assert (reply.status_code, reply.json()["observation"]["total"]) == (200, turn)
            async with socket_to(address, f"?session_id={session_id}") as ws:
                assert (await ask(ws, STATE))["data"]["step_count"] == 3
            if number % 2:
                closed = await rpc(address, "openenv/session/close", {"session_id": session_id})
                assert closed["result"] in (
                    {"session_id": session_id, "closed": True},
                    # The worker has not seen the socket go yet.
                    {"session_id": session_id, "closed": False, "closing": True},
                )
        assert homes == {0, 1}


@pytest.mark.parametrize("over", ["socket", "http"])
async def test_flaw_08_arrays_and_bytes_in_observations(over: str) -> None:
    app = create_app(Awkward, Add, Count, max_concurrent_envs=2)
    async with serving(app) as address:
        seen = []
        for amount in (1, 2):
            if over == "socket":
                async with socket_to(address) as ws:
                    seen.append((await ask(ws, step(amount)))["data"])
            else:
                seen.append((await request(address, "POST", "/step", {"action": {"amount": amount}})).json())
        assert seen[0]["observation"]["extra"] == {"array": [[0, 1], [2, 3]], "scalar": 1.5, "bytes": "_w=="}
        assert seen[1]["reward"] == 0.5
        assert seen[1]["metadata"] == seen[1]["observation"]["metadata"] == {"flag": True, "nan": [None]}


@EVERY_WAY
async def test_flaw_09_binary_frames_and_json_that_is_no_object_leave_the_session(env: type[Counter]) -> None:
    async with serving(app_of(env)) as address, socket_to(address) as ws:
        await ask(ws, step(4))
        for message in (b"\x00", b'{"type":"state"}', "[]", "[1]", "null", "7", '"state"', "true"):
            assert (await ask(ws, message))["type"] == "error"
            assert (await ask(ws, STATE))["data"]["total"] == 4


@EVERY_WAY
async def test_flaw_10_a_bad_seed_is_refused_on_the_socket(env: type[Counter]) -> None:
    async with serving(app_of(env)) as address, socket_to(address) as ws:
        await ask(ws, step(4))
        for seed in (-7, "abc", 1.5, [1], {"seed": 1}):
            data = (await ask(ws, {"type": "reset", "data": {"seed": seed}}))["data"]
            assert data["code"] == "VALIDATION_ERROR"
            assert data["errors"][0]["loc"] == ["seed"]
            assert (await ask(ws, STATE))["data"]["total"] == 4  # nothing was reset


@EVERY_WAY
async def test_flaw_11_production_serves_no_reset_step_or_state(env: type[Counter]) -> None:
    async with serving(app_of(env, mode="production")) as address:
        async with socket_to(address) as ws:
            for frame in ({"type": "reset"}, step(1), STATE):
                assert (await ask(ws, frame))["data"]["code"] == "UNKNOWN_TYPE"
            call = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
            assert "session_id" in (await ask(ws, {"type": "mcp", "data": call}))["data"]["result"]
        for method, path in (("POST", "/reset"), ("POST", "/step"), ("GET", "/state")):
            for headers in ({}, {SESSION: "new"}):
                body = {} if method == "POST" else None
                assert (await request(address, method, path, body, headers)).status_code == 404


async def test_flaw_12_a_foreign_page_cannot_drive_a_local_server() -> None:
    async with serving(app_of(Counter)) as address:
        host, port = address.split(":")
        for headers, status in (
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Host": "rebound.example"}, 421),
        ):
            name = headers.get("Host", host)
            for path in ("/ws", "/mcp"):
                with pytest.raises(InvalidStatus) as refused:
                    await connect(
                        f"ws://{name}:{port}{path}",
                        host=host,
                        port=int(port),
                        origin=headers.get("Origin"),
                        proxy=None,
                    )
                assert refused.value.response.status_code == status
            for method, path in (("POST", "/reset"), ("POST", "/mcp"), ("GET", "/health"), ("GET", "/docs")):
                reply = await request(address, method, path, {} if method == "POST" else None, headers)
                assert reply.status_code == status


@pytest.mark.soak
def test_flaw_12_strangers_need_a_token_and_the_default_is_loopback() -> None:
    with serve() as server:
        listening = [c.laddr for p in server.family for c in p.net_connections() if c.status == "LISTEN"]
        assert listening == [("127.0.0.1", server.port)]
    status, said = refusal("--host", "0.0.0.0")
    assert status != 0
    assert "expected a token to listen beyond loopback" in said
    with serve("--host", "0.0.0.0", "--token", "a-token-of-sixteen-or-more") as server:
        assert server.get("/health")[0] == 401
        assert server.get("/health", authorization="Bearer a-token-of-sixteen-or-more")[0] == 200


async def test_flaw_12_bodies_are_bounded_and_nothing_is_inflated() -> None:
    async with serving(app_of(Counter)) as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /reset HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (150 * MB))
        assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 413 ")
        writer.close()
        offer = [ClientPerMessageDeflateFactory()]
        async with connect(f"ws://{address}/ws", extensions=offer, compression=None, proxy=None) as ws:
            assert ws.protocol.extensions == []
            with suppress(ConnectionClosed):  # already while it sends
                await ws.send("x" * (17 * MB))
            await asyncio.wait_for(ws.wait_closed(), 20)
            assert ws.close_code == 1009


class Waits(Counter):
    """Its first step waits until it is told to go on."""

    BLOCKING = True
    proceed = threading.Event()

    def step(self, action: Add) -> Count:
        self.proceed.wait(60)
        return super().step(action)


@pytest.mark.parametrize("transport", ["websocket", "http"])
async def test_flaw_14_a_timeout_keeps_the_session_and_shifts_no_reply(transport: str) -> None:
    env = type("Waits", (Waits,), {"proceed": threading.Event()})
    async with (
        serving(app_of(env)) as address,
        CounterEnv(f"http://{address}", message_timeout_s=1.0, transport=transport) as client,
    ):
        await client.reset(seed=5, episode_id="the one")
        with pytest.raises(RequestTimeout):
            await client.step(Add(amount=1))
        env.proceed.set()

        async def patiently(ask_again: Any) -> Any:
            async with asyncio.timeout(20):
                while True:
                    try:
                        return await ask_again()
                    except RequestTimeout:  # the environment is not done yet
                        pass

        state = await patiently(client.state)
        assert (state.episode_id, state.total) == ("the one", 6)
        result = await patiently(lambda: client.step(Add(amount=2)))
        assert result.observation.total == 8


def loaded_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


UI_AND_SCIENCE = {"gradio", "pandas", "PIL", "matplotlib", "openai", "huggingface_hub", "torch", "numpy"}


def test_flaw_15_importing_the_client_loads_no_server_and_no_page() -> None:
    loaded = loaded_by(
        "from openenv_core import EnvClient, GenericEnvClient\n"
        "GenericEnvClient('http://localhost:1').sync()\n"
        "import openenv_core.client, openenv_core.providers"
    )
    assert "pydantic" in loaded
    strangers = UI_AND_SCIENCE | {
        "fastapi",
        "starlette",
        "uvicorn",
        "websockets",
        "servers",
        "httpx",
        "requests",
        "yaml",
    }
    assert not loaded & strangers


def test_flaw_15_a_server_loads_no_page() -> None:
    loaded = loaded_by(
        "import servers.cli.serve, servers.hosting, servers.protocols, servers.assembly\n"
        "from servers import create_app\n"
        "from openenv_core import Action, Environment, Observation\n"
        "create_app(Environment, Action, Observation)"
    )
    assert "uvicorn" in loaded
    assert not loaded & (UI_AND_SCIENCE | {"httpx", "yaml", "jinja2"})


def brought_by(requirements: Sequence[str]) -> set[str]:
    """Return the names of all distributions that an installation of some brings."""
    found: set[str] = set()
    waiting = [(text, {""}) for text in requirements]
    while waiting:
        text, extras = waiting.pop()
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = requirement.name.lower().replace("_", "-")
        if name not in found:
            found.add(name)
            waiting += [(needed, {"", *requirement.extras}) for needed in distribution(name).requires or ()]
    return found


def test_flaw_15_an_installation_is_few_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    client = brought_by(project["dependencies"])
    server = client | brought_by(project["optional-dependencies"]["server"])
    assert {"pydantic", "pydantic-core", "httpx", "picows"} <= client
    assert "starlette" in server
    assert len(client) <= 20  # where the released package brings 113
    assert len(server) <= 30


@pytest.mark.slow
async def test_flaw_16_sessions_take_no_thread_each() -> None:
    for app in ("fuzz_app:app", "fuzz_app:in_threads"):
        with serve("--max-sessions", "64", app=app) as server:
            process = psutil.Process(server.process.pid)
            before = process.num_threads()
            sessions = [socket_to(server.address) for _ in range(64)]
            clients = [await session.__aenter__() for session in sessions]
            try:
                for client in clients:
                    reply = await ask(client, {"type": "step", "data": {"text": "a"}})
                    assert reply["type"] == "observation"
                at_64 = process.num_threads()
            finally:
                for session in sessions:
                    await session.__aexit__(None, None, None)
            if app == "fuzz_app:app":
                assert at_64 == before
            else:
                # Threads are as many as calls have been under way at once, and the sessions asked one by one.
                assert at_64 - before <= 8
