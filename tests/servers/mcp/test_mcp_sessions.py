"""Which session a standard request is answered by, whose it is, and when it ends."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from counter import Add, Count, Counter
from fastapi import FastAPI
from mcp.shared.exceptions import MCPError
from mcp_hosts import STATELESS, host, text_of
from mcp_requests import HELLO, LISTING, STREAMS, greet
from serving import eventually, opened, request, rpc, serving
from toolbox import ToolBox, boxes

from openenv_core.tools import ToolAction, ToolObservation
from servers import create_app
from servers.mcp.engine import MAX_CONNECTIONS
from servers.sessions import table as reaper

ALICE, BOB = "alice-alice-alice-alice", "bob-bob-bob-bob-bob-bob"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_the_handshake_opens_a_session_and_its_end_closes_it() -> None:
    app = boxes()
    before = set(ToolBox.living)
    async with serving(app) as address:
        async with host(address) as client:
            assert text_of(await client.call_tool("bump", {"by": 3})) == "3"
            assert text_of(await client.call_tool("bump")) == "4"
            (session,) = app.sessions.standing
            told = await client.call_tool("where")
            assert told.structured_content is not None
            assert told.structured_content["episode"] == 1
            assert client.server_info.name == "toolbox"
        await eventually(lambda: session.ended and not ToolBox.living - before)
        assert app.sessions.active == 0


async def test_who_names_no_session_is_asked_to_begin_a_connection() -> None:
    app = boxes()
    async with serving(app) as address:
        async with host(address, mode="auto") as client:
            assert client.protocol_version == "2025-11-25"
            assert text_of(await client.call_tool("bump")) == "1"
        handle = await opened(address)
        for path, headers in ((f"/mcp/{handle}", {}), ("/mcp", {"X-OpenEnv-Session": handle})):
            async with host(address, path, "auto", headers) as client:
                assert client.protocol_version == STATELESS
                await client.call_tool("bump")
        assert (await rpc(address, "tools/call", {"name": "bump", "session_id": handle}))["result"][
            "data"
        ] == 3


async def test_clients_of_both_kinds_do_not_meet_in_a_session_that_is_not_theirs() -> None:
    app = boxes()
    async with serving(app) as address, host(address) as one, host(address) as two:
        handle = await opened(address)
        async with host(address, mode=STATELESS, headers={"X-OpenEnv-Session": handle}) as three:
            for client, by in ((one, 1), (two, 10), (three, 100)):
                await client.call_tool("bump", {"by": by})
            sums = [text_of(await client.call_tool("bump", {"by": 0})) for client in (one, two, three)]
    assert sums == ["1", "10", "100"]


async def test_several_connections_share_the_session_of_a_handle_and_leave_it() -> None:
    app = boxes()
    async with serving(app) as address:
        handle = await opened(address)
        async with host(address, f"/mcp/{handle}") as one, host(address, f"/mcp/{handle}") as two:
            await one.call_tool("bump")
            assert text_of(await two.call_tool("bump")) == "2"
        (session,) = app.sessions.standing
        assert not session.ended
        assert (await rpc(address, "openenv/session/close", {"session_id": handle}))["result"]["closed"]


async def test_the_stateless_wire_lists_without_a_session_and_does_nothing_else() -> None:
    app = boxes()
    async with serving(app) as address, host(address, mode=STATELESS) as client:
        assert "bump" in [tool.name for tool in (await client.list_tools()).tools]
        assert len((await client.list_prompts()).prompts) == 1
        for call in (
            client.call_tool("bump"),
            client.read_resource("notes:all"),
            client.get_prompt("sum_up"),
        ):
            with pytest.raises(MCPError, match="openenv/session/create"):
                await call
        assert app.sessions.active == 0


async def test_a_header_that_names_no_session_is_refused() -> None:
    async with serving(boxes()) as address:
        for header in ("new", "a b"):
            head = STREAMS | {"X-OpenEnv-Session": header, "mcp-protocol-version": STATELESS}
            reply = await request(address, "POST", "/mcp", LISTING, head)
            assert reply.status_code == 400
            assert reply.json()["id"] == 2


async def test_a_connection_is_not_taken_for_one_of_another_session() -> None:
    async with serving(boxes()) as address:
        mine = (await greet(address)).headers["mcp-session-id"]
        other = await opened(address)
        head = STREAMS | {"mcp-session-id": mine}
        assert (await request(address, "POST", f"/mcp/{mine}", LISTING, head)).status_code == 200
        assert (await request(address, "POST", f"/mcp/{other}", LISTING, head)).status_code == 404
        both = STREAMS | {"X-OpenEnv-Session": mine, "mcp-protocol-version": STATELESS}
        refused = await request(address, "POST", f"/mcp/{other}", LISTING, both)
        assert refused.status_code == 400
        assert "names one session" in refused.text


@pytest.mark.soak
async def test_those_who_open_one_session_at_once_reset_it_once() -> None:
    app = boxes()
    async with serving(app) as address:
        heads = await asyncio.gather(*(greet(address, **{"X-OpenEnv-Session": "ours"}) for _ in range(4)))
        links = {reply.headers["mcp-session-id"] for reply in heads}
        assert len(links) == 4
        assert "ours" in links
        async with host(address, "/mcp/ours", STATELESS) as client:
            where = (await client.call_tool("where")).structured_content
        assert where is not None
        assert where["episode"] == 1
        assert len(app.sessions.standing) == 1


@pytest.mark.soak
async def test_a_full_session_lets_go_of_the_connection_that_was_used_least_lately() -> None:
    async with serving(boxes()) as address:
        handle = await opened(address)
        links = [
            (await greet(address, f"/mcp/{handle}")).headers["mcp-session-id"]
            for _ in range(MAX_CONNECTIONS + 1)
        ]
        found = [
            (await request(address, "POST", "/mcp", LISTING, STREAMS | {"mcp-session-id": link})).status_code
            for link in (links[0], links[1], links[-1])
        ]
    assert found == [404, 200, 200]


async def test_another_token_finds_nothing() -> None:
    app = boxes(tokens=(ALICE, BOB))
    async with serving(app) as address:
        mine = (await greet(address, authorization=f"Bearer {ALICE}")).headers["mcp-session-id"]
        head = STREAMS | bearer(BOB)
        connected = head | {"mcp-session-id": mine}
        assert (await request(address, "POST", "/mcp", LISTING, connected)).status_code == 404
        assert (await request(address, "GET", "/mcp", None, connected)).status_code == 404
        assert (await request(address, "DELETE", "/mcp", None, connected)).status_code == 404
        assert (await request(address, "POST", f"/mcp/{mine}", HELLO, head)).status_code == 404
        stateless = head | {"mcp-protocol-version": STATELESS}
        assert (await request(address, "POST", f"/mcp/{mine}", LISTING, stateless)).status_code == 404
        assert (await request(address, "POST", "/mcp", LISTING, STREAMS)).status_code == 401
        owned = STREAMS | bearer(ALICE) | {"mcp-session-id": mine}
        assert (await request(address, "DELETE", "/mcp", None, owned)).status_code == 200
        assert (await request(address, "POST", "/mcp", LISTING, owned)).status_code == 404
        assert app.sessions.active == 0


async def test_the_cap_holds_and_a_slot_comes_back() -> None:
    app = boxes(cap=1, max_wait_s=0.0)
    async with serving(app) as address:
        first = await greet(address)
        refused = await greet(address)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["data"] == {"active_sessions": 1, "max_sessions": 1}
        assert refused.json()["id"] == 7
        gone = await request(
            address, "DELETE", "/mcp", None, {"mcp-session-id": first.headers["mcp-session-id"]}
        )
        assert gone.status_code == 200
        assert (await greet(address)).status_code == 200


async def test_a_handshake_that_fails_leaves_no_session() -> None:
    class Stubborn(ToolBox):
        def reset(self, seed: int | None = None) -> Any:
            raise RuntimeError("no game today")

    class Sleepy(ToolBox):
        async def reset(self, seed: int | None = None) -> Any:
            await asyncio.sleep(3600)

    async with serving(app := boxes()) as address:
        bad = HELLO | {"params": {"protocolVersion": "2025-11-25"}}
        reply = await request(address, "POST", "/mcp", bad, STREAMS)
        assert json.loads(reply.text.rpartition("data: ")[2])["error"]["code"] == -32602
        only_json = {"accept": "application/json"}
        assert (await request(address, "POST", "/mcp", HELLO, only_json)).status_code == 406
        await eventually(lambda: app.sessions.active == 0)
    app = create_app(Stubborn, ToolAction, ToolObservation, max_concurrent_envs=2)
    async with serving(app) as address:
        reply = await greet(address)
        assert reply.status_code == 500
        assert "no game today" in reply.json()["error"]["message"]
        assert app.sessions.active == 0
    app = create_app(Sleepy, ToolAction, ToolObservation, max_concurrent_envs=2)
    async with serving(app) as address:
        leaving = asyncio.create_task(greet(address))
        await eventually(lambda: app.sessions.standing)
        leaving.cancel()
        await asyncio.wait([leaving])
        await eventually(lambda: app.sessions.active == 0)


async def test_a_session_that_nobody_uses_ends_and_one_with_an_open_stream_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reaper, "MAX_INTERVAL_S", 0.05)  # a lower limit is heeded at once
    app = boxes(idle_timeout_s=600)
    async with serving(app) as address:
        async with host(address):
            (listened,) = app.sessions.standing
            await eventually(lambda: listened.listeners == 1)  # the stream of GET
            unused = (await greet(address)).headers["mcp-session-id"]
            app.sessions._idle_timeout_s = 0.2  # from when both stand, however long that took
            await eventually(lambda: app.sessions.standing == [listened])
            reply = await request(address, "GET", "/mcp", None, STREAMS | {"mcp-session-id": unused})
            assert reply.status_code == 404
            assert not listened.ended
        await eventually(lambda: app.sessions.active == 0)


@pytest.mark.soak
async def test_a_client_that_drops_its_connections_holds_nothing_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reaper, "MAX_INTERVAL_S", 0.05)  # a lower limit is heeded at once
    app = boxes(idle_timeout_s=600)
    async with serving(app) as address:
        link = (await greet(address)).headers["mcp-session-id"]
        head = STREAMS | {"mcp-session-id": link}
        async with (
            httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as http,
            http.stream("GET", "/mcp", headers=head) as stream,
        ):
            assert stream.status_code == 200
            (session,) = app.sessions.standing
            await eventually(lambda: session.listeners == 1)
            app.sessions._idle_timeout_s = 0.2  # from when the stream stands, however long that took
        await eventually(lambda: app.sessions.active == 0)


async def test_a_session_that_ends_takes_its_connections_along() -> None:
    app = boxes()
    async with serving(app) as address, host(address) as client:
        (session,) = app.sessions.standing
        await eventually(lambda: session.listeners == 1)
        await app.sessions.close(session)
        with pytest.raises(MCPError):
            await client.call_tool("bump")
        await eventually(lambda: session.listeners == 0)


async def test_a_server_that_stops_ends_streams_and_sessions() -> None:
    app = boxes(drain_s=2)
    before = set(ToolBox.living)
    async with serving(app) as address:
        link = (await greet(address)).headers["mcp-session-id"]
        async with (
            httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as http,
            http.stream("GET", "/mcp", headers=STREAMS | {"mcp-session-id": link}) as stream,
        ):
            await app.drain(2)
            async with asyncio.timeout(60):
                assert not b"".join([part async for part in stream.aiter_bytes()])
        assert not ToolBox.living - before
    assert "the SDK's connections" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_an_environment_without_tools_says_so() -> None:
    app = create_app(Counter, Add, Count)
    async with serving(app) as address:
        reply = await greet(address)
        assert reply.status_code == 404
        assert "offers no tools" in reply.json()["error"]["message"]


@pytest.mark.soak
async def test_an_app_speaks_mcp_in_production_when_it_is_served_again_and_below_another() -> None:
    app = boxes(mode="production")
    for _ in range(2):
        async with serving(app) as address, host(address) as client:
            assert text_of(await client.call_tool("bump")) == "1"
    parent = FastAPI(lifespan=lambda _: app.router.lifespan_context(app))
    parent.mount("/below", app)
    async with serving(parent) as address, host(address, "/below/mcp") as client:  # type: ignore[arg-type]
        assert text_of(await client.call_tool("bump")) == "1"
