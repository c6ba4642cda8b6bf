"""Servers that stop and sessions that end while standard clients are active."""

import asyncio
import json
import signal
from typing import Any

import httpx
import pytest
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_hosts import STATELESS, host, text_of
from mcp_requests import HELLO, STREAMS, engine_of, greet, tool_call
from serve_process import serve
from serving import (
    WAIT_TIMEOUT_S,
    eventually,
    http_client,
    open_session,
    request,
    rpc,
    serving,
    socket_to,
)
from test_mcp_calls import abort
from toolbox import toolbox_app

from servers.app import EnvironmentApp
from servers.mcp.engine import MAX_CONNECTIONS, _Connection


@pytest.mark.soak
@pytest.mark.parametrize("workers", [1, 2])
async def test_stopping_server_finishes_calls_and_closes_streams(workers: int) -> None:
    options = ["--workers", str(workers)] if workers > 1 else []
    with serve(*options, app="toolbox:app") as server:
        head = STREAMS | {"mcp-session-id": (await greet(server.address)).headers["mcp-session-id"]}
        call = {"json": tool_call("wait", seconds=1.5), "headers": head}
        async with (
            http_client(server.address) as http,
            http.stream("GET", "/mcp", headers=head) as listening,
            http.stream("POST", "/mcp", **call) as reply,
            asyncio.timeout(WAIT_TIMEOUT_S),
        ):
            parts = reply.aiter_text()
            await anext(parts)
            server.process.send_signal(signal.SIGTERM)
            assert '"text":"waited"' in "".join([part async for part in parts])
            assert not await listening.aread()
        assert await asyncio.to_thread(server.process.wait, WAIT_TIMEOUT_S) == 0
        assert "Traceback" not in server.output


def nothing_left(app: EnvironmentApp) -> bool:
    engine = engine_of(app)
    return not (
        app.sessions.active
        or engine._hubs
        or engine._closing
        or [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_serve"]
    )


@pytest.mark.parametrize("late", [True, pytest.param(False, marks=pytest.mark.soak)])
async def test_session_dropped_during_the_handshake_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    app = toolbox_app()
    loop = asyncio.get_running_loop()

    class Doomed(_Connection):
        def __init__(self, session: Any, hub: Any, **options: Any) -> None:
            super().__init__(session, hub, **options)
            if late:
                loop.call_soon(app.sessions.drop, session)
            else:
                app.sessions.drop(session)

    monkeypatch.setattr("servers.mcp.engine._Connection", Doomed)
    async with serving(app) as address:
        await greet(address)
        await eventually(lambda: nothing_left(app))
        await greet(address, f"/mcp/{await open_session(address)}")
        await eventually(lambda: nothing_left(app))


@pytest.mark.soak
async def test_concurrent_handshakes_keep_the_connection_limit_of_a_session() -> None:
    app = toolbox_app()
    async with serving(app) as address:
        handle = await open_session(address)
        greetings = [greet(address, f"/mcp/{handle}") for _ in range(2 * MAX_CONNECTIONS)]
        assert {reply.status_code for reply in await asyncio.gather(*greetings)} <= {200, 503}
        (hub,) = engine_of(app)._hubs.values()
        assert len(hub.peers) == MAX_CONNECTIONS
        await rpc(address, "openenv/session/close", {"session_id": handle})
        await eventually(lambda: nothing_left(app))


async def test_closing_a_session_answers_its_waiting_calls() -> None:
    app = toolbox_app()
    async with serving(app) as address, http_client(address) as http:
        greeted = await http.post("/mcp", json=HELLO, headers=STREAMS)
        head = STREAMS | {"mcp-session-id": greeted.headers["mcp-session-id"]}
        bodies = [tool_call("wait", seconds=60) | {"id": number} for number in range(4)]
        calls = [asyncio.create_task(http.post("/mcp", json=body, headers=head)) for body in bodies]
        (session,) = app.sessions.standing
        await eventually(lambda: session.waiting_calls == 3)
        assert (await http.delete("/mcp", headers=head)).status_code == 200
        for reply in await asyncio.gather(*calls):
            assert "Unknown session_id" in reply.text
        await eventually(lambda: nothing_left(app))


@pytest.mark.parametrize("tool", ["work", pytest.param("wait", marks=pytest.mark.soak)])
async def test_cancelled_call_in_a_socket_session_leaves_the_session_open(tool: str) -> None:
    app = toolbox_app()
    async with serving(app) as address, socket_to(address, path="/mcp") as socket:
        await socket.send(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}))
        handle = json.loads(await socket.recv())["result"]["session_id"]
        async with host(address, f"/mcp/{handle}", STATELESS) as client:
            await abort(client, tool, f"{tool} of a socket")
            assert text_of(await client.call_tool("bump")) == "1"
            session = app.sessions.find("", handle)
            assert session._closing is None


async def test_closed_connection_gets_no_notifications_of_its_shared_session() -> None:
    app = toolbox_app()
    async with serving(app) as address:
        handle = await open_session(address)
        shared = (await greet(address, f"/mcp/{handle}")).headers["mcp-session-id"]
        hub = engine_of(app)._hubs[app.sessions.find("", handle)]
        assert len(hub.peers) == 1
        head = STREAMS | {"mcp-session-id": shared}
        assert (await request(address, "DELETE", "/mcp", None, head)).status_code == 200
        await eventually(lambda: not hub.peers)
        assert not app.sessions.find("", handle).ended


async def test_client_info_and_subscriptions_have_size_limits() -> None:
    async with serving(toolbox_app()) as address:
        long = {"params": {**HELLO["params"], "more": "x" * 300_000}}
        reply = await request(address, "POST", "/mcp", HELLO | long, STREAMS)
        assert reply.status_code == 413
        head = STREAMS | {"mcp-session-id": (await greet(address)).headers["mcp-session-id"]}
        for length, expected in ((300_000, "subscriptions"), (1000, "result")):
            params = {"uri": "notes://" + "x" * length}
            body = {"jsonrpc": "2.0", "id": 1, "method": "resources/subscribe", "params": params}
            assert expected in (await request(address, "POST", "/mcp", body, head)).text


def test_app_without_lifespan_answers_on_successive_event_loops() -> None:
    app = toolbox_app()

    async def ask() -> int:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await asyncio.wait_for(http.post("/mcp", json=HELLO, headers=STREAMS), 60)).status_code

    assert [asyncio.run(ask()) for _ in range(2)] == [200, 200]


async def test_failed_start_of_the_transport_is_answered_with_500(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(manager: StreamableHTTPSessionManager) -> None:
        raise RuntimeError("no wire")

    monkeypatch.setattr(StreamableHTTPSessionManager, "run", broken)
    async with serving(toolbox_app()) as address:
        assert (await asyncio.wait_for(greet(address, "/mcp"), WAIT_TIMEOUT_S)).status_code == 500
