"""The images of the worlds of tools: a task is solved in a container, and an MCP client finds its way in."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

import envs.shop_env.solver
import envs.sqlite_env.solver
from envs.shop_env import ShopEnv
from envs.sqlite_env import SqliteEnv
from openenv_core.cli.main import main
from openenv_core.providers.docker import Engine, LocalDockerProvider
from openenv_core.tools import CallToolAction, CallToolObservation

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.docker, pytest.mark.soak, pytest.mark.timeout(600)]

WORLDS: dict[str, tuple[type[Any], Any]] = {
    "shop": (ShopEnv, envs.shop_env.solver.solve),
    "sqlite": (SqliteEnv, envs.sqlite_env.solver.solve),
}


@pytest.fixture(params=WORLDS)
def world(engine: Engine, request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    tag = f"ropewalk-test-{name}:latest"
    assert main(["build", str(ROOT / "envs" / f"{name}_env"), "--tag", tag]) == 0
    yield name
    subprocess.run(["docker", "image", "rm", "--force", tag], capture_output=True, timeout=60, check=True)


async def test_a_task_is_solved_in_a_container_and_mcp_is_spoken(world: str) -> None:
    client_type, solve = WORLDS[world]
    rewards: list[float] = []
    with LocalDockerProvider(f"ropewalk-test-{world}:latest", memory="512m", pids=128) as provider:
        url = provider.start()
        with client_type(url).sync() as env:

            def call(name: str, arguments: dict[str, Any]) -> CallToolObservation:
                result = env.step(CallToolAction(tool_name=name, arguments=arguments))
                rewards.append(result.reward)
                observation: CallToolObservation = result.observation
                return observation

            solve(env.reset(split="test", index=11).observation.task, call)
        assert sum(rewards) == 1.0
        async with Client(f"{url}/mcp", mode="legacy") as host:
            assert (await host.read_resource("task://current")).contents
