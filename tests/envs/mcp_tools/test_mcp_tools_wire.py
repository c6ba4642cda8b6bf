"""The environment behind a server, over a socket and over MCP; and seven public servers, unchanged."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mcp_hosts import host, text_of
from public_servers import of_npm, of_pypi
from serving import serving
from tool_houses import call, entry, house_of, kind, names, playing

from envs.mcp_tools_env import McpToolsEnv
from envs.mcp_tools_env.models import McpToolsState
from envs.mcp_tools_env.server.environment import McpToolsEnvironment
from envs.mcp_tools_env.server.shared import SharedState
from openenv_core.errors import ToolCallError
from openenv_core.tools import CallToolAction, ToolAction, ToolObservation
from openenv_core.tools.specs import openai_tools
from servers import create_app
from servers.app import EnvironmentApp
from tests.envs.tool_calls import RecordedContext


def app_of(house: SharedState) -> EnvironmentApp:
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
        with pytest.raises(ToolCallError, match="required property"):
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
    async with serving(app_of(house_of({"one": entry()}, calls=3))) as address, host(address) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools["echo"].input_schema["required"] == ["text"]
        assert "tool_reset" in tools
        blocks = await client.call_tool("blocks", {})
        assert [block.type for block in blocks.content] == ["text", "image"]
        assert (await client.call_tool("die", {"code": 1})).is_error
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


def configuration() -> dict[str, Any]:
    return {
        "files": of_npm("server-filesystem", "${SESSION_DIR}"),
        "memory": of_npm("server-memory", env={"MEMORY_FILE_PATH": "${SESSION_DIR}/memory.json"}),
        # It would fetch any address that a policy names, so that tool is not offered.
        "all": {
            **of_npm("server-everything"),
            "ropewalk": {"timeout_s": 10.0, "deny": ["gzip-file-as-resource"]},
        },
        "think": of_npm("server-sequential-thinking"),
        "time": of_pypi("mcp-server-time", "--local-timezone", "UTC"),
        "sqlite": of_pypi("mcp-server-sqlite", "--db-path", "${SESSION_DIR}/data.db"),
        "git": of_pypi("mcp-server-git"),
    }


@pytest.mark.slow
async def test_public_servers_play_unchanged_and_sessions_do_not_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROPEWALK_TOKENS", "canary")
    house = house_of(configuration())
    async with playing(house) as env:
        servers = {info.name: info for info in env.state.servers}
        assert {name for name, info in servers.items() if info.tools} == set(house.settings.servers)
        tools = await env.list_tools()
        assert len(openai_tools(tools)) == len(tools) > 50
        assert "all__gzip-file-as-resource" not in await names(env)
        await files(env)
        await memory(env)
        await everything(env)
        await three_of_pypi(env)
        async with playing(house, servers=["files", "memory", "sqlite"]) as other:
            assert kind(await call(other, "files__read_text_file", path="a.txt")) == "execution_error"
            assert (await call(other, "memory__read_graph")).result == {"entities": [], "relations": []}
            assert (await call(other, "sqlite__list_tables")).result == "[]"
            assert kind(await call(other, "time__get_current_time", timezone="UTC")) == "tool_not_found"
        assert not [entry for entry in env.state.transcript if "infrastructure_error" in entry.metadata]
        assert not any(info.restarts for info in env.state.servers)


async def files(env: Any) -> None:
    assert kind(await call(env, "files__write_file", path="a.txt", content="rope")) is None
    assert (await call(env, "files__read_text_file", path="a.txt")).result == {"content": "rope"}
    outside = await call(env, "files__read_text_file", path="/etc/passwd")
    assert kind(outside) == "execution_error"


async def memory(env: Any) -> None:
    tar = {"name": "Tar", "entityType": "thing", "observations": ["black"]}
    assert kind(await call(env, "memory__create_entities", entities=[tar])) is None
    assert (await call(env, "memory__read_graph")).result == {"entities": [tar], "relations": []}


async def everything(env: Any) -> None:
    assert (await call(env, "all__echo", message="hi")).result == "Echo: hi"
    assert kind(await call(env, "all__get-sum", a="2", b=3)) == "invalid_args"
    image = (await call(env, "all__get-tiny-image")).result
    assert [block["type"] for block in image][:2] == ["text", "image"]
    variables = json.loads((await call(env, "all__get-env")).result)
    assert "canary" not in variables.values()
    progress = RecordedContext()
    await env.call_tool("all__trigger-long-running-operation", {"duration": 0.2, "steps": 2}, progress)
    assert progress.progressed == [1, 2]
    hung = await call(env, "all__trigger-long-running-operation", duration=60, steps=2)
    assert kind(hung) == "timeout"
    assert (await call(env, "all__echo", message="still")).result == "Echo: still"
    thought = {"thought": "knots", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1}
    assert (await call(env, "think__sequentialthinking", **thought)).result["thoughtHistoryLength"] == 1


async def three_of_pypi(env: Any) -> None:
    noon = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    assert json.loads((await call(env, "time__convert_time", **noon)).result)["time_difference"] == "+9.0h"
    await call(env, "sqlite__create_table", query="CREATE TABLE knots (name TEXT)")
    await call(env, "sqlite__write_query", query="INSERT INTO knots VALUES ('bowline')")
    assert "bowline" in (await call(env, "sqlite__read_query", query="SELECT * FROM knots")).result
    assert kind(await call(env, "git__git_status", repo_path=".")) == "execution_error"
