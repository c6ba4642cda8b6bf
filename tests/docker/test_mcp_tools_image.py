"""The image of other people's tool servers: Node is beside Python, and everything else is taken away."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.mcp_tools_env import McpToolsEnv
from openenv_core.cli.main import main
from openenv_core.providers.docker import Engine, LocalDockerProvider

ROOT = Path(__file__).parents[2]

NODE_SERVER = """
require("readline").createInterface({input: process.stdin}).on("line", (line) => {
  const {id, method} = JSON.parse(line);
  const info = {name: "node", version: process.version};
  const text = [{type: "text", text: process.version}];
  const results = {
    "initialize": {protocolVersion: "2025-06-18", capabilities: {tools: {}}, serverInfo: info},
    "tools/list": {tools: [{name: "version", inputSchema: {type: "object"}}]},
    "tools/call": {content: text},
  };
  if (id !== undefined) console.log(JSON.stringify({jsonrpc: "2.0", id, result: results[method] ?? {}}));
});
"""

pytestmark = [pytest.mark.docker, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def image(engine: Engine) -> Iterator[str]:
    tag = "ropewalk-test-mcp-tools:latest"
    assert main(["build", str(ROOT / "envs" / "mcp_tools_env"), "--tag", tag]) == 0
    yield tag
    subprocess.run(["docker", "image", "rm", "--force", tag], capture_output=True, timeout=60, check=True)


def test_servers_of_node_and_of_python_play_in_a_container_with_everything_taken_away(image: str) -> None:
    demo = "/app/env/server/demo_server.py"
    servers = {
        "node": {"command": "node", "args": ["-e", NODE_SERVER]},
        "python": {"command": "python", "args": ["-I", "-S", demo]},
        "npm": {"command": "npx", "args": ["--version"], "ropewalk": {"start_timeout_s": 20}},
    }
    variables = {"MCP_TOOLS_SERVERS": json.dumps({"mcpServers": servers})}
    with (
        LocalDockerProvider(image, network="none", memory="512m", pids=128, env_vars=variables) as provider,
        McpToolsEnv(provider.start()).sync() as env,
    ):
        env.reset(servers=["node", "python"])
        assert env.call_tool("node__version").startswith("v22.")
        assert env.call_tool("python__list_notes") == []
        # It is there, and it is no tool server.
        assert env.reset(servers=["npm"]).done
