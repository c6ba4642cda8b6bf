"""The environment behind a server: steps over a socket, and the same tools over MCP."""

import json
import os
from pathlib import Path

import pytest
from mcp_hosts import host, text_of
from serving import serving
from tool_houses import entry, house_of

from envs.mcp_tools_env import McpToolsEnv
from envs.mcp_tools_env.models import McpToolsState
from envs.mcp_tools_env.server.environment import McpToolsEnvironment
from envs.mcp_tools_env.server.house import House
from openenv_core.errors import ToolCallFailed
from openenv_core.tools import CallToolAction, ToolAction, ToolObservation
from servers import create_app
from servers.app import EnvironmentApp


def app_of(house: House) -> EnvironmentApp:
    class Configured(McpToolsEnvironment):
        def __init__(self) -> None:
            super().__init__(house)

    return create_app(Configured, ToolAction, ToolObservation, max_concurrent_envs=8, state_cls=McpToolsState)


async def test_the_client_lists_calls_and_is_told_of_failures() -> None:
    async with (
        serving(app_of(house_of({"one": entry()}))) as address,
        McpToolsEnv(f"http://{address}") as env,
        McpToolsEnv(f"http://{address}") as other,
    ):
        began = await env.reset(deny=["die"], calls=4)
        assert began.observation.metadata["servers"][0]["title"] == "fixture"
        assert await env.has_tool("echo")
        assert not await env.has_tool("die")
        assert await env.call_tool("echo", text="rope") == "rope"
        assert await other.call_tool("count") == 1
        with pytest.raises(ToolCallFailed, match="required property"):
            await env.call_tool("echo")
        state = await env.state()
        assert isinstance(state, McpToolsState)
        assert (state.calls, state.calls_left) == (2, 2)
        assert [entry.outcome for entry in state.transcript] == ["ok", "invalid_args"]
        for _ in range(2):
            await env.call_tool("count")
        over = await env.step(CallToolAction(tool_name="count"))
        assert over.done
        assert await other.call_tool("count") == 2


async def test_the_same_tools_are_offered_over_mcp() -> None:
    async with serving(app_of(house_of({"one": entry()}, calls=5))) as address, host(address) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools["echo"].input_schema["required"] == ["text"]
        assert "tool_reset" in tools
        counted = await client.call_tool("count", {})
        assert (counted.structured_content, text_of(counted)) == ({"result": 1}, "1")
        blocks = await client.call_tool("blocks", {})
        assert [block.type for block in blocks.content] == ["text", "image"]
        failed = await client.call_tool("fail", {"text": "it is broken"})
        assert (failed.is_error, text_of(failed)) == (True, "it is broken")
        died = await client.call_tool("die", {"code": 1})
        assert died.is_error
        assert (await client.call_tool("count", {})).structured_content == {"result": 1}  # of a new process
        assert "used up" in text_of(await client.call_tool("count", {}))


@pytest.mark.soak
def test_nothing_is_left_of_a_server_that_is_stopped(tmp_path: Path) -> None:
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"one": entry()}}))
    with McpToolsEnv.from_process(env_vars={"MCP_TOOLS_CONFIG": str(config)}) as env:
        about = env.call_tool("about")
        home = about["environ"]["HOME"]
        assert os.path.isdir(home)
    assert not os.path.exists(home)
    assert not os.path.exists(f"/proc/{about['pid']}")
