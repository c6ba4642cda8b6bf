"""A stream that is cut, and the client who comes back for the rest of it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import httpx
import pytest
from mcp.server.streamable_http import GET_STREAM_KEY
from mcp_requests import STREAMS, engine_of, greet, tool_call
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCResponse
from serving import PATIENCE_S, eventually, serving
from toolbox import ToolBox, boxes

from openenv_core.tools import ToolAction, ToolContext, ToolObservation, tool
from servers import create_app
from servers.mcp.events import MAX_EVENTS, MAX_WEIGHT, Events, Kept, weigh

VERSION = {"mcp-protocol-version": "2025-11-25"}


async def events(reply: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Yield the id and the data of each event."""
    text = ""
    async for part in reply.aiter_text():
        text += part
        while "\r\n\r\n" in text:
            event, _, text = text.partition("\r\n\r\n")
            if found := re.search(r"^id: (\d+)", event):
                yield found[1], event.rpartition("data: ")[2].partition("\r\n")[0]


@pytest.mark.parametrize("seconds", [0, 0.3])
async def test_who_comes_back_gets_the_rest_and_nobody_else(seconds: float) -> None:
    async with serving(boxes()) as address:
        url = f"http://{address}/mcp"
        ids = [(await greet(address)).headers["mcp-session-id"] for _ in range(2)]
        mine, other = ({**STREAMS, **VERSION, "mcp-session-id": one} for one in ids)
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
            async with http.stream(
                "POST", url, json=tool_call("wait", seconds=seconds), headers=mine
            ) as reply:
                seen = events(reply)
                first, nothing = await anext(seen)
                last, progress = await anext(seen)
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
    """Says more than is kept, once it is let go."""

    go: ClassVar[asyncio.Event]

    @tool
    async def say_all(self, context: ToolContext) -> str:
        """Say it."""
        context.progress(1)
        await self.go.wait()
        return "x" * MAX_WEIGHT


async def test_who_comes_back_for_a_reply_that_is_too_long_to_be_kept_is_told_so() -> None:
    Vast.go = asyncio.Event()
    app = create_app(Vast, ToolAction, ToolObservation, env_name="vast")
    async with serving(app) as address:
        url = f"http://{address}/mcp"
        mine = {**STREAMS, **VERSION, "mcp-session-id": (await greet(address)).headers["mcp-session-id"]}
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S, verify=False) as http:
            async with http.stream("POST", url, json=tool_call("say_all"), headers=mine) as reply:
                seen = events(reply)
                await anext(seen)
                last, _ = await anext(seen)
            (link,) = engine_of(app)._links._links.values()
            before = link.kept._last
            Vast.go.set()
            await eventually(lambda: link.kept._last > before)
            back = {**mine, "last-event-id": last}
            async with asyncio.timeout(PATIENCE_S), http.stream("GET", url, headers=back) as reply:
                rest = [json.loads(data) async for _, data in _to_the_end(reply) if data]
    assert rest[-1]["id"] == 9
    assert "make the call again" in rest[-1]["error"]["message"]


async def _to_the_end(reply: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Yield events up to the one that answers; the SDK keeps a stream open that it has resumed."""
    async for event_id, data in events(reply):
        yield event_id, data
        if data and json.loads(data).keys() & {"result", "error"}:
            return


def answer(text: str) -> JSONRPCResponse:
    return JSONRPCResponse(jsonrpc="2.0", id=1, result={"content": [{"type": "text", "text": text}]})


def test_what_is_kept_has_bounds() -> None:
    kept = Kept()
    for number in range(MAX_EVENTS + 1):
        kept.add("a", JSONRPCNotification(jsonrpc="2.0", method="m", params={"progress": number}))
    assert kept.after("1") is None
    assert (found := kept.after("2")) is not None
    assert len(found[1]) == MAX_EVENTS - 1
    vast = JSONRPCNotification(jsonrpc="2.0", method="m", params={"text": "x" * MAX_WEIGHT})
    start, place, reply = kept.add("e", None), kept.add("e", vast), kept.add("e", answer("x" * MAX_WEIGHT))
    found = kept.after(start)
    assert found is not None
    told = [(str(event.number), type(event.message)) for event in found[1]]
    assert told == [(place, type(None)), (reply, JSONRPCError)]  # heavier than all that may be: their places
    one, other = kept.add("b", answer("1")), kept.add("d", answer("2"))
    assert kept.after(one) == ("b", [])
    assert kept.after(other) == ("d", [])
    heavy = [kept.add("c", answer("x" * (MAX_WEIGHT // 3))) for _ in range(3)]
    assert kept.after(one) is None
    assert kept.after(heavy[0]) is None
    assert kept.after(heavy[1]) is not None


def test_who_waits_for_whatever_comes_is_known_as_long_as_it_has_missed_nothing() -> None:
    kept = Kept()
    note = JSONRPCNotification(jsonrpc="2.0", method="m", params={})
    older, last = kept.add(GET_STREAM_KEY, note), kept.add(GET_STREAM_KEY, note)
    for _ in range(MAX_EVENTS):
        kept.add("a call", note)
    assert kept.after(last) == (GET_STREAM_KEY, [])
    assert kept.after(older) is None
    assert (found := kept.add(GET_STREAM_KEY, note))
    assert kept.after(last) is None
    assert kept.after(found) == (GET_STREAM_KEY, [])


async def test_what_is_kept_of_all_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servers.mcp.events.MAX_HELD", 102_000)
    events, kept = Events(), [Kept() for _ in range(4)]

    async def store(one: Kept, stream: str = "s", size: int = 30_000) -> None:
        with events.of(one):
            await events.store_event(stream, answer("x" * size))

    for one in (kept[0], kept[1], kept[2], kept[0], kept[3]):
        await store(one, size=20_000 if one is kept[0] else 30_000)
    # The second was told nothing for longest.
    assert [bool(one.weight) for one in kept] == [True, False, True, True]
    events.forget(kept[3])
    await store(kept[1])
    assert [bool(one.weight) for one in kept] == [True, True, True, False]
    await store(kept[1], "n" * 90_000, 1)  # what a client calls its streams weighs too
    assert [bool(one.weight) for one in kept] == [False, False, False, False]
    assert events._weight == 0


def test_a_message_is_weighed_without_being_written() -> None:
    assert 5 * 10_000 < weigh(answer("x" * 50_000)) < 51_000
    assert weigh(None) < 100
    deep: Any = "x"
    for _ in range(5000):
        deep = {"a": [deep]}
    assert weigh(JSONRPCNotification(jsonrpc="2.0", method="m", params=deep)) > 5000
