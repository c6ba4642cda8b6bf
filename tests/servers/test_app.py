"""The options of `create_app`, the metadata of its app, and its lifetime: mounted, served again, with a lifespan."""

import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
from counter import Add, AsyncCounter, Count, Counter, CountState
from fastapi import FastAPI
from server_apps import HEADER, STATE, app_of, mcp, step
from serving import ask, open_session, reconfigured, request, serving, socket_to
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from toolbox import toolbox_app
from websockets.asyncio.client import connect

from openenv_core import ConfigurationError, EnvironmentMetadata, Observation
from openenv_core.types import ConcurrencyConfig
from servers import create_app, create_fastapi_app
from servers.app import EnvironmentApp, building_apps
from servers.hosting import assemble
from servers.settings import ServerSettings

ROOT = Path(__file__).parents[2]
CLIENT_INFO = {"name": "test", "version": "1"}


class Solitary(Counter):
    SUPPORTS_CONCURRENT_SESSIONS = False


class First(Observation):
    rules: str = ""
    pixels: np.ndarray


@pytest.mark.parametrize("env", [Counter, AsyncCounter], ids=lambda e: e.__name__)
async def test_production_serves_no_reset_step_or_state(env: type[Counter]) -> None:
    async with serving(app_of(env, mode="production")) as address:
        for method, path in (("POST", "/reset"), ("POST", "/step"), ("GET", "/state")):
            for headers in ({}, {HEADER: "new"}):
                assert (await request(address, method, path, {}, headers)).status_code == 404
        document = (await request(address, "GET", "/openapi.json")).json()
        assert not {"/reset", "/step", "/state"} & set(document["paths"])
        for path in ("/health", "/metadata", "/schema", "/list_environments"):
            assert (await request(address, "GET", path)).status_code == 200
        for query in ("", f"?session_id={await open_session(address)}"):
            async with socket_to(address, query) as ws:
                for frame in ({"type": "reset"}, step(), STATE):
                    data = (await ask(ws, frame))["data"]
                    assert data["code"] == "UNKNOWN_TYPE"
                    assert "one of mcp, close" in data["message"]
                assert (await ask(ws, {"type": "mcp", "data": mcp("tools/list")}))["data"]["id"] == 7


async def test_middleware_of_the_author_works_on_every_route() -> None:
    page, token = "https://page.example", "a" * 32
    app = app_of(Counter, allowed_origins=(page,), tokens=(token,))
    seen: list[tuple[str, str]] = []

    class Witness:
        def __init__(self, app: ASGIApp) -> None:
            self._app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "lifespan":
                seen.append((scope["type"], scope["path"]))
            await self._app(scope, receive, send)

    app.add_middleware(Witness)
    app.add_middleware(CORSMiddleware, allow_origins=[page], allow_methods=["*"], allow_headers=["*"])
    paths = {getattr(route, "path", "") for route in app.routes}
    assert {"/ws", "/mcp", "/reset", "/step", "/state", "/metrics", "/health", "/schema"} <= paths
    of_mcp = [route for route in app.routes if isinstance(route, Route) and route.path.startswith("/mcp")]
    assert [route.path for route in of_mcp] == ["/mcp", "/mcp/{session_id}"]
    assert all(route.methods == {"GET", "POST", "DELETE"} for route in of_mcp)
    allowed = "access-control-allow-origin"
    origin = {"origin": page}
    signed = {**origin, "authorization": f"Bearer {token}"}
    initialize = mcp("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=CLIENT_INFO)
    standard = {**signed, "accept": "application/json, text/event-stream"}
    async with serving(app) as address:
        for path in sorted(paths - {"/ws"}):
            preflight = {**origin, "access-control-request-method": "POST"}
            reply = await request(address, "OPTIONS", path, None, preflight)
            assert (reply.status_code, reply.headers.get(allowed)) == (200, page), path
        for method, path, body, headers in (
            ("POST", "/reset", {}, signed),
            ("GET", "/state", None, signed),
            ("GET", "/health", None, signed),
            ("POST", "/mcp", mcp("tools/list"), signed),
            ("POST", "/mcp", initialize, standard),
            ("GET", "/mcp", None, standard),
            ("POST", "/mcp/unknown", mcp("tools/list"), standard),
            ("DELETE", "/mcp", None, standard),
        ):
            seen.clear()
            reply = await request(address, method, path, body, headers)
            assert reply.headers.get(allowed) == page, path
            assert seen == [("http", path)]
        for path in ("/ws", "/mcp"):
            async with connect(f"ws://{address}{path}", additional_headers=signed) as ws:
                await ws.send(json.dumps(step() if path == "/ws" else mcp("tools/list")))
                assert json.loads(await ws.recv())
            assert ("websocket", path) in seen
        assert (await request(address, "OPTIONS", "/reset", None, origin)).status_code == 401
        assert (await request(address, "POST", "/reset", {}, origin)).status_code == 401


async def test_app_serves_metadata_and_schema() -> None:
    class Described(Counter):
        calls = 0

        def get_metadata(self) -> EnvironmentMetadata:
            Described.calls += 1
            return EnvironmentMetadata(name="own", description="of its own")

    app = create_app(
        Counter,
        Add,
        Count,
        env_name="counter",
        max_concurrent_envs=2,
        gradio_builder=lambda *_: None,
        custom_tab_name="Game",
        custom_tab_primary=True,
        show_default_tab=False,
        title_override="Counting",
        state_cls=CountState,
        reset_observation_cls=First,
    )
    async with serving(app) as address:
        metadata = (await request(address, "GET", "/metadata")).json()
        assert (metadata["name"], metadata["description"]) == ("counter", "Counts up to a limit.")
        schema = (await request(address, "GET", "/schema")).json()
        assert set(schema) == {"action", "observation", "state", "reset_observation"}
        assert schema["action"]["required"] == ["amount"]
        assert schema["action"]["additionalProperties"] is False
        assert "thread" in schema["state"]["properties"]
        assert {"rules", "pixels"} <= set(schema["reset_observation"]["properties"])
        assert (await request(address, "GET", "/nowhere")).status_code == 404
    async with serving(app_of(Described)) as address:
        for _ in range(2):
            assert (await request(address, "GET", "/metadata")).json()["name"] == "own"
        schema = (await request(address, "GET", "/schema")).json()
        assert schema["reset_observation"] == schema["observation"]
    assert Described.calls == 1
    async with serving(toolbox_app()) as address:
        schema = (await request(address, "GET", "/schema")).json()
        assert schema["action"]["title"] == "CallToolAction"  # by which trainers know that there are tools


async def test_openapi_document_lists_every_status() -> None:
    async with serving(app_of(Counter)) as address:
        document = (await request(address, "GET", "/openapi.json")).json()
        for path in ("/", "/docs", "/redoc"):
            page = await request(address, "GET", path)
            assert page.status_code == 200
            assert all(f"POST {one}" in page.text for one in ("/reset", "/step"))
            assert "amount" in page.text
            assert "src=" not in page.text  # nothing from elsewhere
    assert document["info"]["version"] == "1.0.0"
    paths = document["paths"]
    assert {"/reset", "/step", "/state", "/health", "/metadata", "/schema", "/mcp"} <= set(paths)
    for operations in paths.values():
        for operation in operations.values():
            assert {"200", "401", "403", "421"} <= set(operation["responses"])
    for path in ("/reset", "/step"):
        assert {"413", "422", "429", "500", "503", "504"} <= set(paths[path]["post"]["responses"])
    assert "404" in paths["/step"]["post"]["responses"]
    assert "404" in paths["/state"]["get"]["responses"]
    assert "amount" in document["components"]["schemas"]["ServedAction"]["properties"]
    schema = paths["/step"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["anyOf"][0]["properties"]["action"] == {"$ref": "#/components/schemas/ServedAction"}


# Options and settings


async def test_mode_comes_from_argument_environment_or_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENENV_MODE", "production")
    assert create_app(Counter, Add, Count).settings.mode == "production"
    assert create_app(Counter, Add, Count, mode="simulation").settings.mode == "simulation"
    with building_apps(lambda served, _: EnvironmentApp(served, ServerSettings())):
        app = create_app(Counter, Add, Count, mode="production")
        assert create_fastapi_app(Counter, Add, Count).settings.mode == "simulation"

    @app.get("/own")
    async def own() -> str:
        return "here"

    async with serving(app) as address:
        assert (await request(address, "POST", "/reset")).status_code == 200
        assert (await request(address, "GET", "/own")).json() == "here"
    monkeypatch.setenv("OPENENV_MODE", "staging")
    with pytest.raises(ConfigurationError, match="OPENENV_MODE"):
        create_app(Counter, Add, Count)
    monkeypatch.delenv("OPENENV_MODE")
    for mode in ("staging", 1):
        with pytest.raises(ConfigurationError, match="one of simulation, production"):
            create_app(Counter, Add, Count, mode=mode)  # type: ignore[arg-type]


def test_app_made_before_the_settings_of_its_server_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="made before, without the settings of this server"):
        assemble("toolbox:app", ServerSettings(tokens=("correct-horse-battery-staple",)), ())


def test_cap_and_idle_timeout_come_from_argument_environment_or_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ConcurrencyConfig(max_concurrent_envs=3, session_timeout=12.5)
    app = create_app(Counter, Add, Count, concurrency_config=config)
    assert (app.sessions.slots.cap, app.settings.idle_timeout_s) == (3, 12.5)
    with pytest.raises(ConfigurationError, match="both max_concurrent_envs"):
        create_app(Counter, Add, Count, max_concurrent_envs=3, concurrency_config=config)
    with pytest.raises(ConfigurationError, match="at least 1"):
        create_app(Counter, Add, Count, max_concurrent_envs=0)
    with pytest.raises(ConfigurationError, match="SUPPORTS_CONCURRENT_SESSIONS = True"):
        create_app(Solitary, Add, Count, max_concurrent_envs=2)
    assert create_app(Solitary, Add, Count).sessions.slots.cap == 1
    monkeypatch.setenv("ROPEWALK_MAX_SESSIONS", "5")
    app = create_app(Counter, Add, Count, max_concurrent_envs=2)
    assert app.sessions.slots.cap == 5
    assert reconfigured(app, max_sessions=7).sessions.slots.cap == 7
    with pytest.raises(ConfigurationError, match="SUPPORTS_CONCURRENT_SESSIONS = True"):
        create_app(Solitary, Add, Count)


def test_create_fastapi_app_takes_the_released_argument_order() -> None:
    class Mode(str, Enum):  # noqa: UP042 - as folders written for the released package have it
        PRODUCTION = "production"

    app = create_fastapi_app(Counter, Add, Count, 3, None, "counter", CountState, mode=Mode.PRODUCTION)  # type: ignore[arg-type]
    assert (app.sessions.slots.cap, app.title, app.settings.mode) == (3, "counter", "production")
    assert type(app.settings.mode) is str


async def test_factory_may_be_a_function_of_a_concurrent_class() -> None:
    threads: list[str] = []

    def make() -> Counter:
        """Make a counter."""
        threads.append(threading.current_thread().name)
        return Counter()

    async with serving(create_app(make, Add, Count, max_concurrent_envs=4)) as address:
        assert (await request(address, "POST", "/reset")).status_code == 200
        assert (await request(address, "GET", "/metadata")).json()["name"] == "Counter"
    assert all(name.startswith("environment") for name in threads)
    app = app_of(lambda: Solitary())
    async with serving(app) as address:
        reply = await request(address, "POST", "/reset")
        assert reply.json()["detail"]["code"] == "FACTORY_ERROR"
        assert "SUPPORTS_CONCURRENT_SESSIONS = True" in reply.text
        assert app.sessions.active == 0


# Lives


async def test_mounted_app_works_like_a_standalone_one() -> None:
    closed: list[int] = []

    class Closable(Counter):
        def close(self) -> None:
            closed.append(1)

    app = app_of(Closable)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with app.router.lifespan_context(app):
            yield

    parent = FastAPI(lifespan=lifespan)
    parent.mount("/games", app)
    async with serving(parent) as address:  # type: ignore[arg-type]
        assert (await request(address, "GET", "/games/health")).json() == {"status": "healthy"}
        evil = {"Host": "evil.example"}
        assert (await request(address, "GET", "/games/health", headers=evil)).status_code == 421
        reply = await request(address, "POST", "/games/reset", {"seed": 1}, {HEADER: "new"})
        assert reply.headers["Set-Cookie"].endswith("; Path=/games")
        query = f"?session_id={reply.headers[HEADER]}"
        async with socket_to(address, query, path="/games/ws") as ws:
            assert (await ask(ws, STATE))["data"]["total"] == 1
        created = await request(address, "POST", "/games/mcp", mcp("openenv/session/create"))
        assert "session_id" in created.json()["result"]
        assert app.sessions.active == 2
    assert app.sessions.active == 0
    assert len(closed) == 2


async def test_lifespan_spans_all_connections_and_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(notes))
    import lifelong

    app: EnvironmentApp = lifelong.app
    monkeypatch.setenv("REFUSE", "1")
    with pytest.raises(ConfigurationError, match="a better place"):
        async with app.running():
            raise AssertionError("expected no start")
    monkeypatch.delenv("REFUSE")
    for turn in (1, 2):  # an app may be served again, after a refusal too
        async with serving(app) as address:
            assert notes.read_text().splitlines()[-1] == "start exposed=None"
            assert (await request(address, "POST", "/reset", {}, {HEADER: "new"})).status_code == 200
        lines = notes.read_text().splitlines()
        assert (lines[-2:], lines.count("end")) == (["session closed", "end"], turn)


def test_server_imports_neither_pages_nor_clients() -> None:
    code = (
        "import json, sys\n"
        "import servers.cli.serve, servers.hosting, servers.protocols, servers.fleet.worker\n"
        "from servers import create_app\n"
        "from openenv_core import Action, Environment, Observation\n"
        "create_app(Environment, Action, Observation)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "uvicorn" in loaded
    pages = {"gradio", "pandas", "PIL", "matplotlib", "openai", "huggingface_hub", "torch", "numpy"}
    assert not loaded & (pages | {"httpx", "yaml", "jinja2"})
