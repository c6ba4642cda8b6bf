"""Calls a tool from one or many clients and measures the cost to the client's process.

    python -m benchmarks.mcp.calls KIND PORT CLIENTS SECONDS WARM_UP_S

Prints one JSON object: calls, warm_up (calls before them), seconds, cpu_us (this process, per call), p50_us.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
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
    async with httpx.AsyncClient(trust_env=False) as http:
        created = (await http.post(f"{url}/mcp", json=_rpc("openenv/session/create"))).json()
        session = created["result"]["session_id"]
        async with _standard(f"{url}/mcp/{session}", STATELESS) as call:
            yield call


@asynccontextmanager
async def json_rpc(url: str) -> AsyncIterator[Call]:
    """Call as the released clients do: JSON-RPC over POST /mcp, in a new session."""
    async with httpx.AsyncClient(trust_env=False) as http:
        created = (await http.post(f"{url}/mcp", json=_rpc("openenv/session/create"))).json()
        body = _rpc("tools/call", name="add", arguments=ARGUMENTS, **created["result"])

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


async def measure(kind: str, url: str, clients: int, seconds: float, warm_up_s: float) -> dict[str, float]:
    """Call from `clients` clients at once, each one call after another, for `seconds` after the warm-up."""
    async with AsyncExitStack() as stack:
        calls = [await stack.enter_async_context(KINDS[kind](url)) for _ in range(clients)]
        took: list[float] = []

        async def work(call: Call, end: float) -> None:
            while (began := time.perf_counter()) < end:
                await call()
                took.append(time.perf_counter() - began)

        async def run_for(length: float) -> None:
            end = time.perf_counter() + length
            await asyncio.gather(*(work(call, end) for call in calls))

        await run_for(warm_up_s)
        warm_up = len(took)
        took.clear()
        cpu, began = time.process_time(), time.perf_counter()
        await run_for(seconds)
        return {
            "calls": len(took),
            "warm_up": warm_up,
            "seconds": time.perf_counter() - began,
            "cpu_us": 1e6 * (time.process_time() - cpu) / max(1, len(took)),
            "p50_us": 1e6 * statistics.median(took or [0.0]),
        }


def main() -> None:
    """Measure what the command line asks for."""
    kind, port, clients, *times = sys.argv[1:]
    seconds, warm_up_s = map(float, times)
    result = asyncio.run(measure(kind, f"http://127.0.0.1:{port}", int(clients), seconds, warm_up_s))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
