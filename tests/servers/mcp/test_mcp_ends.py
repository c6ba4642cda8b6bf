"""Servers that stop, and sessions that end, while standard clients are in the middle of something."""

import asyncio
import signal
from typing import Any

import httpx
import pytest
from serve_process import serve
from serving import PATIENCE_S
from test_mcp_sessions import HELLO, STREAMS


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": "p"}}
    return {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": params}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_server_that_stops_lets_calls_end_and_closes_streams(workers: int) -> None:
    words = ["--workers", str(workers)] if workers > 1 else []
    with serve(*words, app="toolbox:app") as server:
        async with httpx.AsyncClient(
            base_url=f"http://{server.address}", trust_env=False, timeout=PATIENCE_S, verify=False
        ) as http:
            listening, begun = asyncio.Event(), asyncio.Event()

            async def listen(head: dict[str, str]) -> None:
                async with http.stream("GET", "/mcp", headers=head) as stream:
                    listening.set()
                    assert not b"".join([part async for part in stream.aiter_bytes()])

            async def wait(head: dict[str, str]) -> str:
                text = ""
                body = call("wait", seconds=1.5)
                async with http.stream("POST", "/mcp", json=body, headers=head) as reply:
                    async for part in reply.aiter_text():
                        begun.set()
                        text += part
                return text

            greeted = await http.post("/mcp", json=HELLO, headers=STREAMS)
            head = STREAMS | {"mcp-session-id": greeted.headers["mcp-session-id"]}
            both = asyncio.gather(listen(head), wait(head))
            await asyncio.wait_for(asyncio.gather(listening.wait(), begun.wait()), PATIENCE_S)
            server.process.send_signal(signal.SIGTERM)
            _, told = await both
            assert '"text":"waited"' in told
        assert await asyncio.to_thread(server.process.wait, PATIENCE_S) == 0
        assert "Traceback" not in server.output
