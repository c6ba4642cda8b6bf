"""Images of environments: played with all privileges dropped, validated, staged as a Space."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from module_run import finished
from sqlite_solver import solve

from envs.mcp_tools_env import McpToolsEnv
from envs.sqlite_env import SqliteEnv
from openenv_core.cli.main import main
from openenv_core.client import GenericEnvClient
from openenv_core.images.space import stage
from openenv_core.providers.docker import DockerEngine, LocalDockerProvider
from openenv_core.tools import CallToolAction, CallToolObservation

ROOT = Path(__file__).parents[2]
BAD = "ropewalk-test-validate-bad:latest"

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


def docker_cli(*words: str) -> str:
    done = finished("docker", *words, timeout_s=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return done.stdout.strip()


def ropewalk(*words: str) -> "subprocess.CompletedProcess[str]":
    return finished(sys.executable, "-m", "openenv_core.cli", *words, cwd=ROOT, timeout_s=800)


@contextmanager
def built(folder: Path, name: str) -> Iterator[str]:
    """Build an environment's image for the time of a test; yield its tag."""
    tag = f"ropewalk-test-{name}:latest"
    assert main(["build", str(folder), "--tag", tag]) == 0
    try:
        yield tag
    finally:
        docker_cli("image", "rm", "--force", tag)


def test_blackjack_s_container_plays_a_hand_with_everything_taken_away(blackjack: str) -> None:
    with (
        LocalDockerProvider(blackjack, network="none", memory="256m", pids=64) as provider,
        GenericEnvClient(provider.start()).sync() as client,
    ):
        result = client.reset(seed=7)
        while not result.done:
            result = client.step({"action": "stand"})
        assert result.reward in (-1, 0, 1)


@pytest.mark.soak
def test_the_engine_sees_that_blackjack_is_healthy(blackjack: str) -> None:
    options = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--health-interval", "1s"]
    container = docker_cli("run", "--detach", *options, blackjack)
    try:
        end = time.monotonic() + 60
        while (status := health(container)) == "starting" and time.monotonic() < end:
            time.sleep(0.2)
        assert status == "healthy"
        wrong = finished("docker", "exec", "--env", "PORT=9", container, "healthcheck", timeout_s=60)
        assert wrong.returncode == 1
        assert "expected a healthy server on port 9" in wrong.stdout
    finally:
        docker_cli("rm", "--force", container)


def health(container: str) -> str:
    return str(json.loads(docker_cli("inspect", container))[0]["State"]["Health"]["Status"])


@pytest.mark.soak
def test_a_staged_space_of_blackjack_builds_and_serves_by_itself(
    engine: DockerEngine, tmp_path: Path
) -> None:
    stage(ROOT / "envs" / "blackjack_env", tmp_path)
    # The hub runs containers as a user of its own, and its callers name the Space.
    with built(tmp_path, "space") as tag, LocalDockerProvider(tag, user="1000") as provider:
        url, headers = f"{provider.start()}/health", {"Host": "me-dice.hf.space"}
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            assert json.load(answer) == {"status": "healthy"}


# ---- ropewalk validate IMAGE


@pytest.fixture(scope="module")
def bad(engine: DockerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "Dockerfile").write_text('FROM python:3.11-slim\nCMD ["sleep", "3600"]\n')
    docker_cli("build", "-t", BAD, str(folder))
    yield BAD
    docker_cli("image", "rm", "--force", BAD)


def test_good_image_passes_every_level(blackjack: str) -> None:
    done = ropewalk("validate", blackjack, "--json", "--episodes", "50", "--fuzz", "20")
    results = {one["check"]: one for one in json.loads(done.stdout)["results"]}
    assert done.returncode == 0, [one for one in results.values() if one["status"] in ("failed", "crashed")]
    passed = {name for name, one in results.items() if one["status"] == "passed"}
    assert passed >= {"manifest_valid", "episode_ends", "same_seed_same_episode", "sessions_are_separate"}
    assert not containers(blackjack)


@pytest.mark.soak
def test_bad_image_is_reported(bad: str) -> None:
    arguments = ["--level", "static", "--check", "schema_valid", "--start-timeout", "3", "--json"]
    done = ropewalk("validate", bad, *arguments)
    assert done.returncode == 1, done.stderr
    results = {one["check"]: one for one in json.loads(done.stdout)["results"]}
    (failed,) = (
        one for one in results.values() if one["status"] in ("failed", "crashed")
    )  # once for all checks
    assert "a server that starts" in failed["message"]
    assert failed["change"]
    assert not containers(bad)


def containers(image: str) -> list[Any]:
    return [one for one in DockerEngine.find().list_labelled("ropewalk.owner") if one["Image"] == image]


# ---- worlds of tools, and other people's tool servers


@pytest.mark.soak
async def test_task_is_solved_in_a_container_over_mcp(engine: DockerEngine) -> None:
    rewards: list[float] = []
    with (
        built(ROOT / "envs" / "sqlite_env", "sqlite") as tag,
        LocalDockerProvider(tag, memory="512m", pids=128) as provider,
    ):
        url = provider.start()
        with SqliteEnv(url).sync() as env:

            def call(name: str, arguments: dict[str, Any]) -> CallToolObservation:
                result = env.step(CallToolAction(tool_name=name, arguments=arguments))
                rewards.append(result.reward)
                observation: CallToolObservation = result.observation
                return observation

            solve(env.reset(split="test", index=11).observation.task, call)
        assert sum(rewards) == 1.0
        async with Client(f"{url}/mcp", mode="legacy") as host:
            assert (await host.read_resource("task://current")).contents


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


@pytest.mark.soak
def test_servers_of_node_and_of_python_play_in_a_container_with_everything_taken_away(
    engine: DockerEngine,
) -> None:
    demo = "/app/env/server/demo_server.py"
    servers = {
        "node": {"command": "node", "args": ["-e", NODE_SERVER]},
        "python": {"command": "python", "args": ["-I", "-S", demo]},
        "npm": {"command": "npx", "args": ["--version"], "ropewalk": {"start_timeout_s": 20}},
    }
    variables = {"MCP_TOOLS_SERVERS": json.dumps({"mcpServers": servers})}
    options = {"network": "none", "memory": "512m", "pids": 128, "env_vars": variables}
    with (
        built(ROOT / "envs" / "mcp_tools_env", "mcp-tools") as tag,
        LocalDockerProvider(tag, **options) as provider,
        McpToolsEnv(provider.start()).sync() as env,
    ):
        env.reset(servers=["node", "python"])
        assert env.call_tool("node__version").startswith("v22.")
        assert env.call_tool("python__list_notes") == []
        # It is there, and it is no tool server.
        assert env.reset(servers=["npm"]).done
