"""Below another application."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import counter
from fastapi import FastAPI
from serving import ask, request, serving, socket_to

from servers import create_app


class Closable(counter.Counter):
    closed = 0

    def close(self) -> None:
        type(self).closed += 1


async def test_a_mounted_app_does_all_that_it_does_alone() -> None:
    story = type("Story", (Closable,), {"closed": 0})
    app = create_app(story, counter.Add, counter.Count, env_name="counter", max_concurrent_envs=4)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with app.router.lifespan_context(app):
            yield

    parent = FastAPI(lifespan=lifespan)
    parent.mount("/games", app)
    async with serving(parent) as address:  # type: ignore[arg-type]
        assert (await request(address, "GET", "/games/health")).json() == {"status": "healthy"}
        assert (
            await request(address, "GET", "/games/health", headers={"Host": "evil.example"})
        ).status_code == 421
        opened = await request(address, "POST", "/games/reset", {"seed": 1}, {"X-OpenEnv-Session": "new"})
        session = opened.headers["X-OpenEnv-Session"]
        assert opened.headers["Set-Cookie"].endswith("; Path=/games")
        async with socket_to(address, f"?session_id={session}", path="/games/ws") as ws:
            assert (await ask(ws, {"type": "state"}))["data"]["total"] == 1
        call = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
        assert "session_id" in json.loads((await request(address, "POST", "/games/mcp", call)).text)["result"]
        assert app.sessions.active == 2
    assert app.sessions.active == 0
    assert story.closed == 2
