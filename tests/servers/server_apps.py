"""Shared by the tests of the server: counters behind an app, and request frames."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from counter import Add, AsyncCounter, BlockingCounter, Count, Counter, CountState, Slow, SlowAsync
from serving import eventually, reconfigured
from websockets.asyncio.client import ClientConnection

from servers import create_app
from servers.app import EnvironmentApp

HEADER = "X-OpenEnv-Session"
STATE = {"type": "state"}
EVERY_WAY = pytest.mark.parametrize("env", [Counter, BlockingCounter, AsyncCounter], ids=lambda e: e.__name__)
"""On the loop, in a thread, async."""


class Deaf(SlowAsync):
    """Its steps ignore cancellation."""

    async def step(self, action: Add) -> Count:
        self.entered.set()
        while not self.release.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return Count()


def app_of(env: Any, cap: int = 4, **settings: Any) -> EnvironmentApp:
    """Serve counters of some class, with server settings of the test's choice; nobody waits for a slot by default."""
    app = create_app(env, Add, Count, env_name="counter", max_concurrent_envs=cap, state_cls=CountState)
    return reconfigured(app, **{"max_wait_s": 0.0, **settings})


def step(amount: int = 2) -> dict[str, Any]:
    """The frame of a step."""
    return {"type": "step", "data": {"amount": amount}}


async def start_step(ws: ClientConnection, env: type[Slow]) -> None:
    """Send a step that hangs, and wait until it is in the environment."""
    await ws.send(json.dumps(step()))
    await eventually(env.entered.is_set)


def action(amount: int = 2) -> dict[str, Any]:
    """The body of a step over plain HTTP."""
    return {"action": {"amount": amount}}


def mcp(method: str, **params: Any) -> dict[str, Any]:
    """A JSON-RPC request."""
    return {"jsonrpc": "2.0", "id": 7, "method": method} | ({"params": params} if params else {})
