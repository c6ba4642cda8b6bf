"""An agent that runs in the container of a Harbor task, with the gateway as its language model."""

import json
import sys
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest
from serving import serving

from openenv_core.providers.docker import DockerEngine
from rl_bridge.types import Ending

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

_BRIDGE = Path(__file__).parents[1] / "rl_bridge"
sys.path[:0] = [str(_BRIDGE / name) for name in ("rollout", "gateway", "agents")]

TASK = {
    "task.toml": '[agent]\ntimeout_sec = 100\n[environment]\ndocker_image = "python:3.11-slim"\nworkdir = "/srv"\n',
    "instruction.md": "Write the word rope into word.txt.\n",
    "tests/test.sh": "#!/bin/bash\ngrep -qx rope word.txt && echo 1 > /logs/verifier/reward.txt && exit\n"
    "echo 0 > /logs/verifier/reward.txt\n",
}
AGENT = """
import json, os, subprocess, sys, urllib.request
chat = [{"role": "user", "content": sys.argv[1]}]
while True:
    headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
    body = json.dumps({"model": "policy", "messages": chat}).encode()
    request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body, headers)
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    print(message["content"], flush=True)
    if message["content"] == "Done.":
        break
    done = subprocess.run(message["content"], shell=True, capture_output=True, text=True)
    chat += [message, {"role": "user", "content": "It printed: " + done.stdout}]
"""
"""The plainest coding agent: it runs each answer as a shell command."""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from envs.harbor_env.server.environment import shared_machines, shared_tasks

    for name, text in TASK.items():
        file = tmp_path / "tasks" / "write-a-word" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setenv("HARBOR_TASKS", str(tmp_path / "tasks"))
    for shared in (shared_machines, shared_tasks):
        shared.cache_clear()
    yield
    for shared in (shared_machines, shared_tasks):
        shared.cache_clear()


async def test_agent_in_the_container_of_a_task_is_graded_and_its_tokens_are_trained(
    engine: DockerEngine, tasks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent_fixtures import agent_playing
    from test_agent_episodes import parts
    from worker_fixtures import trajectories

    from envs.harbor_env.server.app import app
    from rl_bridge.environments.leases import SessionDeadlines
    from rl_bridge.rollout.tool_task import ToolWorldTask

    (bridge,) = engine.call("GET", "/networks/bridge")["IPAM"]["Config"]
    agent = {
        "command": ("python3", "{folder}/agent.py", "{task}"),
        "env": {"URL": "{url}", "KEY": "{key}"},
        "files": {"agent.py": AGENT},
        "in_environment": True,
        "gateway_host": str(ip_network(bridge["Subnet"])[1]),
        "timeout_s": 200.0,
    }
    answers = iter(["hostname; pwd", "echo rope > word.txt", "Done."])
    options = parts(monkeypatch, lambda prompt: next(answers)) | {"deadlines": SessionDeadlines(step_s=200.0)}
    async with (
        serving(app) as address,
        agent_playing(f"http://{address}", tmp_path, agent, str, ToolWorldTask, **options) as play,
    ):
        result = await play([7])
    assert result.last_failure is None, result.last_failure
    (episode,) = trajectories(result)
    assert (episode.ending, episode.reward, len(episode.turns)) == (Ending.COMPLETED, 1.0, 3)
    output = (tmp_path / "agents/worker/0.log").read_text()
    assert output.splitlines() == ["hostname; pwd", "echo rope > word.txt", "Done."]
    asked = json.dumps(play.engine.asked[1])
    assert "/srv" in asked  # it ran there, not here
