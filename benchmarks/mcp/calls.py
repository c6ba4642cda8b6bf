"""Calls a tool and measures the cost to the client's process.

    python -m benchmarks.mcp.calls KIND URL SECONDS WARM_UP_S

Prints one JSON object: calls (those of the warm-up included), and the figures of the others.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Literal, TypeAlias

import httpx

Call: TypeAlias = Callable[[], Awaitable[Any]]
STATELESS: Final = "2026-07-28"
ARGUMENTS: Final[Mapping[str, int]] = {"a": 19, "b": 23}
SUM: Final = 42


@asynccontextmanager
async def in_process(_: str) -> AsyncIterator[Call]:
    """Call the SDK's server through the SDK's client, in one process."""
    from mcp import Client

    from benchmarks.mcp.sdk import server

    async with Client(server) as client:
        yield _checked(lambda: client.call_tool("add", dict(ARGUMENTS)))


@asynccontextmanager
async def stateless(url: str) -> AsyncIterator[Call]:
    """Call over streamable HTTP without a handshake, the session named in the path."""
    async with _session(url) as (_, session), _standard(f"{url}/mcp/{session}", STATELESS) as call:
        yield call


@asynccontextmanager
async def json_rpc(url: str) -> AsyncIterator[Call]:
    """Call as the released clients do: JSON-RPC over POST /mcp, in a new session."""
    async with _session(url) as (http, session):
        body = _rpc("tools/call", name="add", arguments=ARGUMENTS, session_id=session)

        async def call() -> None:
            reply = (await http.post(f"{url}/mcp", json=body)).json()
            _require_sum(reply["result"]["data"])

        yield call


@asynccontextmanager
async def step(url: str) -> AsyncIterator[Call]:
    """Call as a step of the episode, through our client."""
    from openenv_core import MCPToolClient

    async with MCPToolClient(base_url=url) as client:
        await client.reset()

        async def call() -> None:
            _require_sum(await client.call_tool("add", **ARGUMENTS))

        yield call


@asynccontextmanager
async def _session(url: str) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    async with httpx.AsyncClient(trust_env=False) as http:
        created = (await http.post(f"{url}/mcp", json=_rpc("openenv/session/create"))).json()
        yield http, created["result"]["session_id"]


@asynccontextmanager
async def _standard(url: str, mode: Literal["legacy", "2026-07-28"]) -> AsyncIterator[Call]:
    from mcp import Client

    async with Client(url, mode=mode) as client:
        yield _checked(lambda: client.call_tool("add", dict(ARGUMENTS)))


KINDS: Final[Mapping[str, Callable[[str], AbstractAsyncContextManager[Call]]]] = {
    "in_process": in_process,
    # Streamable HTTP in a session created by `initialize`; without a handshake; the SDK's server has no sessions then.
    "handshake": lambda url: _standard(f"{url}/mcp", "legacy"),
    "stateless": stateless,
    "stateless_sdk": lambda url: _standard(f"{url}/mcp", STATELESS),
    "json_rpc": json_rpc,
    "step": step,
}


def _checked(send: Callable[[], Awaitable[Any]]) -> Call:
    async def call() -> None:
        _require_sum((await send()).structured_content["result"])

    return call


def _require_sum(value: Any) -> None:
    if value != SUM:
        raise SystemExit(f"expected {SUM} from the tool, got {value!r}")


def _rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


async def measure(kind: str, url: str, seconds: float, warm_up_s: float) -> dict[str, float]:
    """Make one call after another, for `seconds` after the warm-up."""
    calls = 0
    async with KINDS[kind](url) as call:
        for length in (warm_up_s, seconds):
            took: list[float] = []
            cpu_s, began = time.process_time(), time.perf_counter()
            while (start := time.perf_counter()) < began + length:
                await call()
                took.append(time.perf_counter() - start)
            calls += len(took)
        return {
            "calls": calls,
            "calls/s": len(took) / (time.perf_counter() - began),
            "client µs a call": 1e6 * (time.process_time() - cpu_s) / len(took),
            "p50 µs": 1e6 * statistics.median(took),
        }


if __name__ == "__main__":
    kind, url, *times = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(kind, url, *map(float, times)))))
