"""Standard MCP with two worker processes: any worker finds the session of a request."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from mcp.shared.exceptions import MCPError
from mcp_hosts import HANDSHAKE, STATELESS, host, text_of
from mcp_requests import LISTING, STREAMS, connected, start_call
from serve_process import ServeProcess, serve
from serving import open_session, request

from servers.fleet.forwarder import worker_of

# Fleets of real processes, one of them killed.
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def fleet() -> Iterator[ServeProcess]:
    with serve("--workers", "2", app="toolbox:app") as server:
        yield server


async def play(address: str, number: int, era: str) -> None:
    progress_values: list[float] = []

    async def progress(done: float, *_: Any) -> None:
        progress_values.append(done)

    async with await connected(address, era) as client:
        for turn in range(3):
            assert text_of(await client.call_tool("bump", {"by": number})) == str(number * (turn + 1))
        waited = await client.call_tool("wait", {"seconds": 0.2}, progress_callback=progress)
        assert text_of(waited) == "waited"
    assert progress_values == [1]


async def path_at(address: str, worker: int) -> str:
    while worker_of(handle := await open_session(address), 2) != worker:
        pass
    return f"/mcp/{handle}"


@pytest.mark.parametrize("era", [HANDSHAKE, STATELESS])
async def test_concurrent_sessions_over_two_workers_stay_separate(fleet: ServeProcess, era: str) -> None:
    await asyncio.gather(*(play(fleet.address, number + 1, era) for number in range(12)))
    for worker in range(2):
        async with host(fleet.address, await path_at(fleet.address, worker), era) as client:
            assert len(text_of(await client.call_tool("long", {"size": 10_000_000}))) == 10_000_000


async def test_cancelled_calls_free_their_sessions_across_workers(fleet: ServeProcess) -> None:
    async def abort(era: str) -> None:
        async with await connected(fleet.address, era) as client:
            call = await start_call(client, "wait")
            call.cancel()
            await asyncio.wait([call])
            assert text_of(await client.call_tool("bump")) == "1"  # or it would wait for the call

    await asyncio.gather(*(abort(era) for era in (HANDSHAKE, STATELESS) for _ in range(4)))


async def test_change_notifications_reach_a_stream_at_another_worker(fleet: ServeProcess) -> None:
    for _ in range(4):
        handle = await open_session(fleet.address)
        async with (
            host(fleet.address, f"/mcp/{handle}", STATELESS) as client,
            client.listen(tools_list_changed=True) as events,
        ):
            await client.call_tool("note", {"title": "new", "text": "x"})
            async with asyncio.timeout(60):
                async for event in events:
                    assert type(event).__name__ == "ToolsListChanged"
                    break


async def test_killed_worker_loses_only_its_own_sessions() -> None:
    with serve("--workers", "2", app="toolbox:app") as server:
        paths = [await path_at(server.address, worker) for worker in range(2)]
        async with (
            host(server.address, paths[0], HANDSHAKE) as one,
            host(server.address, paths[1], HANDSHAKE) as two,
        ):
            await one.call_tool("bump")
            call = await start_call(one, "wait")
            (killed,) = (w for w in psutil.Process(server.process.pid).children() if _index(w) == 0)
            os.kill(killed.pid, signal.SIGKILL)
            with pytest.raises(MCPError):
                await asyncio.wait_for(call, 60)
            assert text_of(await two.call_tool("bump")) == "1"
        reply = await request(
            server.address, "POST", paths[0], LISTING, STREAMS | {"mcp-protocol-version": STATELESS}
        )
        assert reply.status_code in (404, 502)


def _index(worker: psutil.Process) -> int:
    (path,) = {str(c.laddr) for c in worker.net_connections("unix") if str(c.laddr).endswith(".sock")}
    return int(path.rpartition("/")[2].removesuffix(".sock"))
