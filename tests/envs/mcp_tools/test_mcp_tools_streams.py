"""How often a server is asked for a stream of events that it ends, and wants to be asked for again."""

import itertools

import httpx2
import pytest
from httpx2 import Request, Response

from envs.mcp_tools_env.server.upstream import http
from envs.mcp_tools_env.server.upstream.fault import Fault


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.waited: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(http.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(http.asyncio, "sleep", clock.sleep)
    return clock


async def answered(_: object, request: Request) -> Response:
    return Response(200, headers={"content-type": "text/event-stream"}, stream=httpx2.ByteStream(b""))


async def test_a_few_requests_go_at_once_and_further_ones_are_spaced(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", answered)
    transport = http.PinnedTransport(Fault(), allow_private=True)

    async def waits(count: int) -> list[float]:
        clock.waited.clear()
        for _ in itertools.repeat(None, count):
            await transport.handle_async_request(Request("GET", "http://127.0.0.1/mcp"))
        return clock.waited

    # A stream that breaks, and is asked for again when the server said, is none of those that are held up.
    assert await waits(http.GETS_AT_ONCE) == [0.0] * http.GETS_AT_ONCE
    assert await waits(3) == pytest.approx([http.BETWEEN_GETS_S] * 3)
    clock.now += 2 * http.BETWEEN_GETS_S
    assert await waits(3) == pytest.approx([0.0, 0.0, http.BETWEEN_GETS_S])
