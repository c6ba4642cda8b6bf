"""Environments over a test's tool servers."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from envs.mcp_tools_env.server.config import McpToolsSettings, servers_of
from envs.mcp_tools_env.server.environment import McpToolsEnvironment
from envs.mcp_tools_env.server.shared import SharedState
from openenv_core.errors import EpisodeOverError
from openenv_core.outcomes import infrastructure_failure
from openenv_core.tools import CallToolAction, CallToolObservation, ListToolsAction, ListToolsObservation

TOOL_SERVER = Path(__file__).with_name("tool_server.py")


def entry(*args: str, **ropewalk: Any) -> dict[str, Any]:
    """Return the configuration entry of the fixture server."""
    return {"command": sys.executable, "args": ["-I", "-S", str(TOOL_SERVER), *args], "ropewalk": ropewalk}


def house_of(servers: dict[str, Any], environ: dict[str, str] | None = None, **settings: Any) -> SharedState:
    specs = servers_of({"mcpServers": servers}, environ or {})
    return SharedState(McpToolsSettings(servers=specs, **settings))


@asynccontextmanager
async def playing(house: SharedState, **options: Any) -> AsyncIterator[McpToolsEnvironment]:
    env = McpToolsEnvironment(house)
    try:
        began = await env.reset_async(**options)
        assert not began.done, began.metadata
        yield env
    finally:
        await env.close_async()


async def call(env: McpToolsEnvironment, tool: str, **arguments: Any) -> CallToolObservation:
    observation = await env.step_async(CallToolAction(tool_name=tool, arguments=arguments))
    assert isinstance(observation, CallToolObservation)
    return observation


async def names(env: McpToolsEnvironment) -> list[str]:
    observation = await env.step_async(ListToolsAction())
    assert isinstance(observation, ListToolsObservation)
    return [tool.name for tool in observation.tools]


def kind(seen: CallToolObservation) -> str | None:
    return None if seen.error is None else seen.error.error_type.value


async def failure_to_begin(servers: dict[str, Any]) -> str:
    """Return the infrastructure error that ends an episode with these servers at its start."""
    env = McpToolsEnvironment(house_of(servers))
    try:
        began = await env.reset_async()
        assert (began.done, began.reward, began.tools) == (True, None, [])
        with pytest.raises(EpisodeOverError):
            await call(env, "count")
        return infrastructure_failure(began) or ""
    finally:
        await env.close_async()
