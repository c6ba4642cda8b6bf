"""Production mode, what create_app takes, and what the OpenAPI document says."""

from enum import Enum
from typing import Any

import pytest
from counter import Add, AsyncCounter, Count, Counter, CountState
from serving import ask, opened, request, serving, socket_to

from openenv_core import ConfigurationError, Observation
from servers import create_app, create_fastapi_app
from servers.settings import ServerSettings


class First(Observation):
    rules: str = ""


async def paths_of(address: str) -> dict[str, Any]:
    paths: dict[str, Any] = (await request(address, "GET", "/openapi.json")).json()["paths"]
    return paths


@pytest.mark.parametrize("env", [Counter, AsyncCounter], ids=lambda e: e.__name__)
async def test_production_serves_no_reset_step_or_state(env: type[Counter]) -> None:
    async with serving(create_app(env, Add, Count, mode="production", max_concurrent_envs=4)) as address:
        for method, path in (("POST", "/reset"), ("POST", "/step"), ("GET", "/state")):
            assert (await request(address, method, path, {"action": {"amount": 1}})).status_code == 404
        assert not {"/reset", "/step", "/state"} & set(await paths_of(address))
        assert (await request(address, "GET", "/schema")).status_code == 200
        for query in ("", f"?session_id={await opened(address)}"):
            async with socket_to(address, query) as ws:
                for frame in ({"type": "reset"}, {"type": "step", "data": {"amount": 1}}, {"type": "state"}):
                    data = (await ask(ws, frame))["data"]
                    assert data["code"] == "UNKNOWN_TYPE"
                    assert "one of mcp, close" in data["message"]
                call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
                assert (await ask(ws, {"type": "mcp", "data": call}))["data"]["id"] == 1


async def test_the_mode_comes_from_where_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_MODE", "production")
    app = create_app(Counter, Add, Count)
    assert app.settings.mode == "production"
    assert create_app(Counter, Add, Count, mode="simulation").settings.mode == "simulation"
    app.configure(ServerSettings())
    async with serving(app) as address:
        assert (await request(address, "POST", "/reset")).status_code == 200
    monkeypatch.setenv("OPENENV_MODE", "staging")
    with pytest.raises(ConfigurationError, match="OPENENV_MODE"):
        create_app(Counter, Add, Count)
    monkeypatch.delenv("OPENENV_MODE")
    with pytest.raises(ConfigurationError, match="one of simulation, production"):
        create_app(Counter, Add, Count, mode="staging")  # type: ignore[arg-type]


async def test_what_create_app_is_told_of_a_page_is_taken() -> None:
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
        schema = (await request(address, "GET", "/schema")).json()
        assert set(schema) == {"action", "observation", "state", "reset_observation"}
        assert "rules" in schema["reset_observation"]["properties"]


async def test_the_other_name_has_another_order() -> None:
    class Mode(str, Enum):  # noqa: UP042 - as folders written for the released package have it
        PRODUCTION = "production"

    app = create_fastapi_app(Counter, Add, Count, 3, None, "counter", CountState, mode=Mode.PRODUCTION)  # type: ignore[arg-type]
    assert (app.sessions.slots.cap, app.title, app.settings.mode) == (3, "counter", "production")
    assert type(app.settings.mode) is str


async def test_settings_keep_what_was_added_to_the_app() -> None:
    app = create_app(Counter, Add, Count)

    @app.get("/own")
    async def own() -> str:
        return "here"

    app.configure(ServerSettings(max_sessions=3, mode="production"))
    app.configure(ServerSettings(max_sessions=2))
    async with serving(app) as address:
        assert (await request(address, "GET", "/own")).json() == "here"
        assert (await request(address, "POST", "/reset")).status_code == 200
        assert (await request(address, "GET", "/health")).status_code == 200


async def test_the_openapi_document_names_every_status() -> None:
    async with serving(create_app(Counter, Add, Count, env_name="counter")) as address:
        document = (await request(address, "GET", "/openapi.json")).json()
        assert document["info"]["version"] == "1.0.0"
        for page in ("/docs", "/redoc"):
            assert (await request(address, "GET", page)).status_code == 200
        paths = document["paths"]
        assert {"/reset", "/step", "/state", "/health", "/metadata", "/schema", "/mcp"} <= set(paths)
        for operations in paths.values():
            for operation in operations.values():
                assert {"200", "401", "403", "421"} <= set(operation["responses"])
        for path in ("/reset", "/step"):
            responses = set(paths[path]["post"]["responses"])
            assert {"413", "422", "429", "500", "503", "504"} <= responses
        assert "404" in paths["/step"]["post"]["responses"]
        assert "404" in paths["/state"]["get"]["responses"]
        assert "amount" in document["components"]["schemas"]["ServedAction"]["properties"]
        schema = paths["/step"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["anyOf"][0]["properties"]["action"] == {"$ref": "#/components/schemas/ServedAction"}
