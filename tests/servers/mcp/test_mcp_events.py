"""Broken streams, resumed by their client."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import ClassVar

import httpx
import pytest
from mcp_requests import STREAMS, engine_of, greet, tool_call
from serving import WAIT_TIMEOUT_S, eventually, serving
from toolbox import ToolBox, toolbox_app

from openenv_core.tools import ToolAction, ToolContext, ToolObservation, tool
from servers import create_app
from servers.mcp.events import MAX_WEIGHT

VERSION = {"mcp-protocol-version": "2025-11-25"}


async def events(reply: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Yield the id and the data of each event."""
    text = ""
    async for part in reply.aiter_text():
        text += part
        while "\r\n\r\n" in text:
            event, _, text = text.partition("\r\n\r\n")
            if id_match := re.search(r"^id: (\d+)", event):
                yield id_match[1], event.rpartition("data: ")[2].partition("\r\n")[0]


@pytest.mark.parametrize("seconds", [0, 0.3])
async def test_resumed_stream_yields_the_rest_to_its_owner_only(seconds: float) -> None:
    async with serving(toolbox_app()) as address:
        url = f"http://{address}/mcp"
        ids = [(await greet(address)).headers["mcp-session-id"] for _ in range(2)]
        mine, other = ({**STREAMS, **VERSION, "mcp-session-id": one} for one in ids)
        async with httpx.AsyncClient(trust_env=False, timeout=WAIT_TIMEOUT_S) as http:
            async with http.stream(
                "POST", url, json=tool_call("wait", seconds=seconds), headers=mine
            ) as reply:
                stream_events = events(reply)
                first, nothing = await anext(stream_events)
                last, progress = await anext(stream_events)
                assert nothing == ""  # only a number to come back with
                assert json.loads(progress)["method"] == "notifications/progress"
            async with http.stream("GET", url, headers={**mine, "last-event-id": last}) as reply:
                rest = [json.loads(data) async for _, data in _to_the_end(reply) if data]
            assert rest[-1]["id"] == 9
            assert rest[-1]["result"]["content"][0]["text"] == "waited"
            assert "notifications/progress" not in [one.get("method") for one in rest]
            for headers, event_id in ((other, first), (other, last), (mine, "77"), (mine, "nonsense")):
                refused = await http.get(url, headers={**headers, "last-event-id": event_id})
                assert (refused.status_code, refused.headers["content-type"]) == (400, "application/json")
                assert "Last-Event-ID" in refused.json()["error"]["message"]
            async with http.stream("GET", url, headers={**mine, "last-event-id": first}) as reply:
                again = [json.loads(data) async for _, data in events(reply) if data]  # it ends by itself
            assert again[-1]["id"] == 9


class Vast(ToolBox):
    """Replies with more than is stored, once its event is set."""

    go: ClassVar[asyncio.Event]

    @tool
    async def say_all(self, context: ToolContext) -> str:
        """Say it."""
        context.progress(1)
        await self.go.wait()
        return "x" * MAX_WEIGHT


async def test_resuming_for_a_reply_too_large_to_keep_gets_an_error() -> None:
    Vast.go = asyncio.Event()
    app = create_app(Vast, ToolAction, ToolObservation, env_name="vast")
    async with serving(app) as address:
        url = f"http://{address}/mcp"
        mine = {**STREAMS, **VERSION, "mcp-session-id": (await greet(address)).headers["mcp-session-id"]}
        async with httpx.AsyncClient(trust_env=False, timeout=WAIT_TIMEOUT_S, verify=False) as http:
            async with http.stream("POST", url, json=tool_call("say_all"), headers=mine) as reply:
                stream_events = events(reply)
                await anext(stream_events)
                last, _ = await anext(stream_events)
            ((link,),) = [one.peers.values() for one in engine_of(app)._hubs.values()]
            before = link.events._last_id
            Vast.go.set()
            await eventually(lambda: link.events._last_id > before)
            back = {**mine, "last-event-id": last}
            async with asyncio.timeout(WAIT_TIMEOUT_S), http.stream("GET", url, headers=back) as reply:
                rest = [json.loads(data) async for _, data in _to_the_end(reply) if data]
    assert rest[-1]["id"] == 9
    assert "make the call again" in rest[-1]["error"]["message"]


async def _to_the_end(reply: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Yield events up to the reply; the SDK keeps a resumed stream open."""
    async for event_id, data in events(reply):
        yield event_id, data
        if data and json.loads(data).keys() & {"result", "error"}:
            return
