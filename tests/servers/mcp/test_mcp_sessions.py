"""Sessions of standard MCP requests: which one answers, who owns it, when it ends."""

import asyncio
import json
from typing import Any

import pytest
from counter import Add, Count, Counter
from fastapi import FastAPI
from mcp.shared.exceptions import MCPError
from mcp_hosts import STATELESS, host, text_of
from mcp_requests import HELLO, LISTING, STREAMS, greet
from serving import eventually, http_client, open_session, request, rpc, serving
from toolbox import ToolBox, toolbox_app

from openenv_core.tools import ToolAction, ToolObservation
from servers import create_app
from servers.mcp.engine import MAX_CONNECTIONS
from servers.sessions import table as reaper

ALICE, BOB = "alice-alice-alice-alice", "bob-bob-bob-bob-bob-bob"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_handshake_opens_a_session_and_disconnect_closes_it() -> None:
    app = toolbox_app()
    before = set(ToolBox.living)
    async with serving(app) as address:
        async with host(address) as client:
            assert text_of(await client.call_tool("bump", {"by": 3})) == "3"
            assert text_of(await client.call_tool("bump")) == "4"
            (session,) = app.sessions.standing
            result = await client.call_tool("where")
            assert result.structured_content is not None
            assert result.structured_content["episode"] == 1
            assert client.server_info.name == "toolbox"
        await eventually(lambda: session.ended and not ToolBox.living - before)
        assert app.sessions.active == 0


async def test_refused_handshake_opens_no_session_and_names_none() -> None:
    made = 0

    class Counted(ToolBox):
        def __init__(self) -> None:
            nonlocal made
            made += 1
            super().__init__()

    app = create_app(Counted, ToolAction, ToolObservation)
    without = {key: value for key, value in HELLO["params"].items() if key != "protocolVersion"}
    async with serving(app) as address:
        for status, hello, headers in (
            (400, {**HELLO, "params": without}, STREAMS),
            (400, {**HELLO, "params": {**HELLO["params"], "clientInfo": "me"}}, STREAMS),
            (400, {**HELLO, "jsonrpc": "1.0"}, STREAMS),
            (406, HELLO, {"accept": "application/json"}),
            (415, HELLO, {**STREAMS, "content-type": "text/plain"}),
        ):
            refused = await request(address, "POST", "/mcp", hello, headers)
            assert (refused.status_code, refused.json()["id"]) == (status, 7)
            assert "mcp-session-id" not in refused.headers
        assert (made, app.sessions.active) == (0, 0)
        assert (await greet(address)).headers["mcp-session-id"]


async def test_auto_mode_uses_the_handshake_without_a_session_id() -> None:
    async with serving(toolbox_app()) as address:
        handle = await open_session(address)
        for path, version in (("/mcp", "2025-11-25"), (f"/mcp/{handle}", STATELESS)):
            async with host(address, path, "auto") as client:
                assert client.protocol_version == version
                assert text_of(await client.call_tool("bump")) == "1"


async def test_connections_share_the_session_of_a_handle_and_leave_it_open() -> None:
    app = toolbox_app()
    async with serving(app) as address, host(address) as own:
        handle = await open_session(address)
        async with (
            host(address, f"/mcp/{handle}") as one,
            host(address, f"/mcp/{handle}") as two,
            host(address, f"/mcp/{handle}", STATELESS) as three,
        ):
            await own.call_tool("bump", {"by": 100})
            sums = [text_of(await client.call_tool("bump")) for client in (one, two, three, own)]
        assert sums == ["1", "2", "3", "101"]
        assert not app.sessions.find("", handle).ended
        assert (await rpc(address, "openenv/session/close", {"session_id": handle}))["result"]["closed"]


async def test_stateless_client_without_a_session_can_only_list() -> None:
    app = toolbox_app()
    async with serving(app) as address, host(address, mode=STATELESS) as client:
        assert "bump" in [tool.name for tool in (await client.list_tools()).tools]
        assert len((await client.list_prompts()).prompts) == 1
        for call in (
            client.call_tool("bump"),
            client.read_resource("notes:all"),
            client.get_prompt("sum_up"),
        ):
            with pytest.raises(MCPError, match="openenv/session/create") as refused:
                await call
            assert f"then use http://{address}/mcp/SESSION_ID" in str(refused.value)
            assert "--mcp-single-session" in str(refused.value)
        assert app.sessions.active == 0


async def test_clients_that_name_no_session_share_one_where_the_server_says_so() -> None:
    app = toolbox_app(mcp_single_session=True)
    async with serving(app) as address:
        async with (
            host(address, mode=STATELESS) as one,
            host(address, mode="auto") as two,  # asks server/discover which protocol there is
            host(address) as three,
        ):
            assert two.protocol_version == STATELESS
            assert "bump" in [tool.name for tool in (await one.list_tools()).tools]
            bumps = await asyncio.gather(*(client.call_tool("bump") for client in (one, two, three)))
            assert sorted(text_of(result) for result in bumps) == ["1", "2", "3"]
            (session,) = app.sessions.standing
        async with host(address, mode=STATELESS) as later:
            assert text_of(await later.call_tool("bump")) == "4"
            await app.sessions.close(session)
            assert text_of(await later.call_tool("bump")) == "1"
            assert app.sessions.active == 1


async def test_single_session_is_one_of_each_token() -> None:
    app = toolbox_app(mcp_single_session=True, tokens=(ALICE, BOB))
    async with serving(app) as address:
        for token in (ALICE, BOB):
            async with host(address, mode=STATELESS, headers=bearer(token)) as client:
                assert text_of(await client.call_tool("bump")) == "1"


async def test_connection_id_is_not_accepted_for_another_session() -> None:
    async with serving(toolbox_app()) as address:
        mine = (await greet(address)).headers["mcp-session-id"]
        other = await open_session(address)
        head = STREAMS | {"mcp-session-id": mine}
        for path, status in ((f"/mcp/{mine}", 200), ("/mcp", 200), (f"/mcp/{other}", 404)):
            assert (await request(address, "POST", path, LISTING, head)).status_code == status
        unknown = STREAMS | {"mcp-protocol-version": STATELESS}
        refused = await request(address, "POST", "/mcp/nobody", LISTING, unknown)
        assert (refused.status_code, refused.json()["id"]) == (404, 2)


@pytest.mark.soak
async def test_full_session_drops_its_least_recently_used_connection() -> None:
    async with serving(toolbox_app()) as address:
        handle = await open_session(address)
        links = [
            (await greet(address, f"/mcp/{handle}")).headers["mcp-session-id"]
            for _ in range(MAX_CONNECTIONS + 1)
        ]
        statuses = [
            (await request(address, "POST", "/mcp", LISTING, STREAMS | {"mcp-session-id": link})).status_code
            for link in (links[0], links[1], links[-1])
        ]
    assert statuses == [404, 200, 200]


async def test_session_of_another_token_is_not_found() -> None:
    app = toolbox_app(tokens=(ALICE, BOB))
    async with serving(app) as address:
        mine = (await greet(address, authorization=f"Bearer {ALICE}")).headers["mcp-session-id"]
        head = STREAMS | bearer(BOB)
        connected, stateless = head | {"mcp-session-id": mine}, head | {"mcp-protocol-version": STATELESS}
        for method, path, body, headers, status in (
            ("POST", "/mcp", LISTING, connected, 404),
            ("GET", "/mcp", None, connected, 404),
            ("DELETE", "/mcp", None, connected, 404),
            ("POST", f"/mcp/{mine}", HELLO, head, 404),
            ("POST", f"/mcp/{mine}", LISTING, stateless, 404),
            ("POST", "/mcp", LISTING, STREAMS, 401),
            ("DELETE", "/mcp", None, connected | bearer(ALICE), 200),
            ("POST", "/mcp", LISTING, connected | bearer(ALICE), 404),
        ):
            assert (await request(address, method, path, body, headers)).status_code == status
        assert app.sessions.active == 0


async def test_session_cap_holds_and_a_closed_session_frees_its_slot() -> None:
    async with serving(toolbox_app(cap=1, max_wait_s=0.0)) as address:
        first = (await greet(address)).headers["mcp-session-id"]
        refused = await greet(address)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["data"] == {"active_sessions": 1, "max_sessions": 1}
        assert refused.json()["id"] == 7
        assert (await request(address, "DELETE", "/mcp", None, {"mcp-session-id": first})).status_code == 200
        assert (await greet(address)).status_code == 200


async def test_failed_handshake_leaves_no_session() -> None:
    class Stubborn(ToolBox):
        def reset(self, seed: int | None = None) -> Any:
            raise RuntimeError("no game today")

    class Sleepy(ToolBox):
        async def reset(self, seed: int | None = None) -> Any:
            await asyncio.sleep(3600)

    async with serving(app := toolbox_app()) as address:
        bad = HELLO | {"params": {"protocolVersion": "2025-11-25"}}
        reply = await request(address, "POST", "/mcp", bad, STREAMS)
        assert json.loads(reply.text.rpartition("data: ")[2])["error"]["code"] == -32602
        only_json = {"accept": "application/json"}
        assert (await request(address, "POST", "/mcp", HELLO, only_json)).status_code == 406
        await eventually(lambda: app.sessions.active == 0)
    async with serving(app := create_app(Stubborn, ToolAction, ToolObservation)) as address:
        reply = await greet(address)
        assert (reply.status_code, app.sessions.active) == (500, 0)
        assert "no game today" in reply.json()["error"]["message"]
    async with serving(app := create_app(Sleepy, ToolAction, ToolObservation)) as address:
        leaving = asyncio.create_task(greet(address))
        await eventually(lambda: app.sessions.standing)
        leaving.cancel()
        await asyncio.wait([leaving])
        await eventually(lambda: app.sessions.active == 0)


async def test_idle_session_ends_unless_a_stream_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "MAX_INTERVAL_S", 0.05)  # a lower limit is heeded at once
    app = toolbox_app(idle_timeout_s=600)
    async with serving(app) as address, http_client(address) as http:
        head = STREAMS | {"mcp-session-id": (await greet(address)).headers["mcp-session-id"]}
        async with http.stream("GET", "/mcp", headers=head) as stream:
            assert stream.status_code == 200
            (listened,) = app.sessions.standing
            await eventually(lambda: listened.listeners == 1)
            unused = (await greet(address)).headers["mcp-session-id"]
            app.sessions._idle_timeout_s = 0.2  # from when both stand, however long that took
            await eventually(lambda: app.sessions.standing == [listened])
            reply = await request(address, "GET", "/mcp", None, STREAMS | {"mcp-session-id": unused})
            assert reply.status_code == 404
            assert not listened.ended
        await eventually(lambda: app.sessions.active == 0)


async def test_closing_a_session_closes_its_connections() -> None:
    app = toolbox_app()
    async with serving(app) as address, host(address) as client:
        (session,) = app.sessions.standing
        await eventually(lambda: session.listeners == 1)
        await app.sessions.close(session)
        with pytest.raises(MCPError):
            await client.call_tool("bump")
        await eventually(lambda: session.listeners == 0)


async def test_draining_ends_streams_and_sessions() -> None:
    app = toolbox_app(drain_s=2)
    before = set(ToolBox.living)
    async with serving(app) as address:
        link = (await greet(address)).headers["mcp-session-id"]
        async with (
            http_client(address) as http,
            http.stream("GET", "/mcp", headers=STREAMS | {"mcp-session-id": link}) as stream,
        ):
            await app.drain(2)
            async with asyncio.timeout(60):
                assert not b"".join([part async for part in stream.aiter_bytes()])
        assert not ToolBox.living - before
    assert "the SDK's connections" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_environment_without_tools_is_answered_with_404() -> None:
    async with serving(create_app(Counter, Add, Count)) as address:
        reply = await greet(address)
    assert reply.status_code == 404
    assert "offers no tools" in reply.json()["error"]["message"]


@pytest.mark.soak
async def test_app_serves_mcp_in_production_mode_repeatedly_and_mounted() -> None:
    app = toolbox_app(mode="production")
    for _ in range(2):
        async with serving(app) as address, host(address) as client:
            assert text_of(await client.call_tool("bump")) == "1"
    parent = FastAPI(lifespan=lambda _: app.router.lifespan_context(app))
    parent.mount("/below", app)
    async with serving(parent) as address, host(address, "/below/mcp") as client:  # type: ignore[arg-type]
        assert text_of(await client.call_tool("bump")) == "1"
