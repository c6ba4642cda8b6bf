"""What a tool says that the wire cannot carry, and what it says more of than a client can take."""

import asyncio
import math
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError
from mcp_hosts import HANDSHAKE, STATELESS, text_of
from mcp_requests import STREAMS, connected, greet, tool_call
from serving import request, serving
from toolbox import ToolBox

from openenv_core import EpisodeOver
from openenv_core.tools import (
    NoSuchResource,
    ToolAction,
    ToolContext,
    ToolObservation,
    prompt,
    resource,
    tool,
)
from servers import create_app
from servers.mcp.outbox import MAX_WAITING, Outbox
from servers.mcp.replies import Replies

HALF = "half of a pair: \ud800"


class Odd(ToolBox):
    def before_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        if name == "bump":
            raise EpisodeOver(HALF)

    @resource("odd:one")
    def one(self) -> str:
        return HALF

    @resource("odd:none")
    def none(self) -> str:
        raise NoSuchResource(HALF)

    @prompt
    def say(self) -> str:
        return HALF

    @tool
    def told(self, context: ToolContext) -> str:
        context.progress(math.nan)
        context.progress(1, message=HALF)
        return "said"


@pytest.mark.parametrize("era", [HANDSHAKE, pytest.param(STATELESS, marks=pytest.mark.soak)])
async def test_halves_of_pairs_are_told_otherwise(era: str) -> None:
    app = create_app(Odd, ToolAction, ToolObservation, max_concurrent_envs=4)
    seen: list[Any] = []

    async def progress(done: float, _: float | None, message: str | None) -> None:
        seen.append((done, message))

    async with serving(app) as address, await connected(address, era) as client, asyncio.timeout(30):
        assert "a pair: ?" in text_of(await client.call_tool("bump"))
        assert "a pair: ?" in str(await client.read_resource("odd:one"))
        with pytest.raises(MCPError, match=r"a pair: \?"):
            await client.read_resource("odd:none")
        assert "a pair: ?" in str(await client.get_prompt("say"))
        assert text_of(await client.call_tool("told", progress_callback=progress)) == "said"
    assert seen == [(1, "half of a pair: ?")]


async def test_progress_that_is_no_number_is_not_told() -> None:
    app = create_app(Odd, ToolAction, ToolObservation, max_concurrent_envs=4)
    async with serving(app) as address:
        head = STREAMS | {"mcp-session-id": (await greet(address)).headers["mcp-session-id"]}
        told = (await request(address, "POST", "/mcp", tool_call("told"), head)).text
    assert told.count("notifications/progress") == 1


async def test_a_thread_that_tells_without_end_fills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    outbox = Outbox()
    told: list[int] = []
    woken: list[Any] = []
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (woken.append(args), wake(*args)))

    def tell() -> None:
        for number in range(5000):

            async def message(number: int = number) -> None:
                told.append(number)

            outbox.put(message)

    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()  # the loop has no time meanwhile
    await outbox.flush()
    assert len(woken) == 1
    assert told == list(range(5000))[-MAX_WAITING:]
    thread = threading.Thread(target=tell)
    thread.start()
    while thread.is_alive() or outbox._waiting:  # noqa: ASYNC110 - what is waited for knows no event
        await asyncio.sleep(0)
    await outbox.flush()
    assert told[-1] == 4999


async def sent(*parts: bytes) -> list[Any]:
    """Send a stream of the SDK's through `Replies`; return what became of it."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    replies = Replies(send, b"id", None, answers=True)
    headers = [(b"content-type", b"text/event-stream"), (b"mcp-session-id", b"inner")]
    await replies({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        await replies({"type": "http.response.body", "body": part, "more_body": True})
    await replies({"type": "http.response.body", "body": b"", "more_body": False})
    return messages


PRIMING = b"id: 1\r\ndata: \r\nretry: 1000\r\n\r\n"


def event(data: bytes) -> bytes:
    return b"id: 2\r\nevent: message\r\ndata: " + data + b"\r\n\r\n"


@pytest.mark.parametrize(
    "reply",
    [
        b'{"jsonrpc":"2.0","id":7,"result":{}}',
        b'{"jsonrpc":"2.0","id":"a\\"b","error":{"code":1,"message":"x"}}',
    ],
)
async def test_a_reply_that_comes_first_is_sent_as_json(reply: bytes) -> None:
    for parts in ((PRIMING, event(reply)), (event(reply),)):
        head, *bodies = await sent(*parts)
        assert dict(head["headers"]) == {
            b"content-type": b"application/json",
            b"content-length": str(len(reply)).encode(),
            b"mcp-session-id": b"id",
        }
        assert [body["body"] for body in bodies] == [reply]


@pytest.mark.parametrize(
    "other",
    [
        b'{"jsonrpc":"2.0","method":"notifications/message","params":{"data":{"result":1}}}',
        b'{"jsonrpc":"2.0","id":1,"method":"elicitation/create","params":{"requestedSchema":{"result":{}}}}',
    ],
)
async def test_what_is_told_or_asked_first_is_sent_as_a_stream(other: bytes) -> None:
    reply = event(b'{"jsonrpc":"2.0","id":7,"result":{}}')
    head, *bodies = await sent(PRIMING, event(other), reply)
    assert dict(head["headers"])[b"content-type"] == b"text/event-stream"
    assert [body["body"] for body in bodies] == [PRIMING, event(other), reply, b""]
