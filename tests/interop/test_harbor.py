"""Harbor's own trials of our tasks get the same rewards as here."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from docker_engine import engine
from harbor_tasks import IN_A_SANDBOX, NOTHING, SOLVED, TASKS
from missing import missing
from module_run import finished
from released import DRIVERS, ROOT, environment
from serve_process import serve

from envs.harbor_env import HarborEnv

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

__all__ = ["engine"]

HARBOR = ROOT / ".venvs" / "harbor-3.12" / "bin" / "python"
WAIT_TIMEOUT_S = 500


def require_harbor() -> None:
    if not HARBOR.is_file():
        missing("needs Harbor on Python 3.12: PROFILE=harbor scripts/newer-python --version")


@pytest.mark.docker
@pytest.mark.usefixtures("engine")
def test_verdicts_match_those_of_harbor(tmp_path: Path) -> None:
    require_harbor()
    names = ("count-lines", "sort-table")
    command = [HARBOR, DRIVERS / "harbor_trials.py", tmp_path, *(TASKS / name for name in names)]
    done = finished(*command, env=environment(), cwd=tmp_path, timeout_s=WAIT_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert list(told) == list(names)
    for name, found in told.items():
        assert (found["valid"], found["faults"]) == (True, []), name
        assert found["oracle"] == {"rewards": SOLVED[name], "failure": None}, name
        assert found["nop"] == {"rewards": NOTHING[name], "failure": None}, name


WRONG = {
    "count-lines": "echo 4 > count.txt",
    "fix-median": "echo def >> stats.py",
    "make-tool": "printf '#!/bin/bash\necho $1\n' > shout; chmod +x shout; echo bash > /logs/artifacts/done.txt",
    "report": "mkdir -p /tmp/report; printf 'daily\nnobody\n' > /tmp/report/report.txt",
    "sort-table": "printf 'name,age\nBob,9\nCleo,21\nAda,36\n' > people.csv",
}
"""Solutions that miss what the task asks for."""

TAMPERING = """
mkdir -p /tests /logs/verifier
printf '#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n' > /tests/test.sh
echo 'print(1)' > /tests/judge.py
echo 4 | tee /tests/expected.txt > count.txt
chmod 777 /tests/*
echo 1 > /logs/verifier/reward.txt
echo '{"reward": 1, "share": 1}' > /logs/verifier/reward.json
chmod 444 /logs/verifier/*
true
"""
"""Changes the tests and writes the reward, instead of solving the task."""

Rewards = dict[str, dict[str, float]]
EXPECTED: dict[str, Rewards] = {
    "solved": SOLVED,
    "wrong": {**NOTHING, "fix-median": {"reward": 0.0, "share": 0.0}},
    "tampering": NOTHING,
}
"""The rewards by kind of solution and task."""


def copy_tasks(folder: Path, names: list[str], kind: str, *, into_images: bool) -> dict[str, str]:
    """Copy tasks, each with a solution of the kind, and return the solutions by task.

    Harbor's Docker environment plays only tasks with an image, and cuts them off the network with images of its own
    from a registry. So a task is given an image and the network if `into_images` is set.
    """
    solutions: dict[str, str] = {}
    for name in names:
        shutil.copytree(TASKS / name, folder / name)
        solution, table = folder / name / "solution" / "solve.sh", folder / name / "task.toml"
        if kind != "solved":
            solution.write_text(f"#!/bin/bash\n{WRONG[name] if kind == 'wrong' else TAMPERING}\n")
        solutions[name] = solution.read_text()
        if into_images:
            text = table.read_text().replace('network_mode = "no-network"\n', "")
            if name in IN_A_SANDBOX:
                image = '[environment]\ndocker_image = "python:3.11-slim"\nworkdir = "/app"'
                text = text.replace("[environment]", image)
            table.write_text(text)
    return solutions


def play_in_harbor(folder: Path, output: Path) -> Rewards:
    """Return the rewards of Harbor's own runner, with its Docker environment and its agent that runs the solution."""
    words = ("run", "--path", folder, "--agent", "oracle", "--env", "docker", "--jobs-dir", output, "--yes")
    done = finished(
        *(HARBOR.with_name("harbor"), *words, "--quiet", "--n-concurrent", "5"),
        env=environment(LITELLM_LOCAL_MODEL_COST_MAP="True"),  # it would look for prices on the internet
        cwd=output,
        timeout_s=WAIT_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rewards: Rewards = {}
    for file in output.glob("*/*/result.json"):
        result = json.loads(file.read_text())
        assert result["exception_info"] is None, result["exception_info"]
        rewards[Path(result["task_id"]["path"]).name] = result["verifier_result"]["rewards"]
    return rewards


def play_here(folder: Path, solutions: dict[str, str]) -> Rewards:
    """Return the rewards that a client gets which runs the solutions on `ropewalk serve harbor`."""
    rewards: Rewards = {}
    with serve(str(folder), app="harbor") as server, HarborEnv(f"http://{server.address}").sync() as env:
        for index, name in enumerate(sorted(solutions)):
            env.reset(split="train", index=index)
            env.write_file("/tmp/solve.sh", solutions[name])
            assert env.run("bash /tmp/solve.sh").observation.exit_code == 0, name
            end = env.submit().observation
            assert end.rewards is not None, end
            rewards[name] = end.rewards
    return rewards


@pytest.mark.docker
@pytest.mark.soak
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("kind", EXPECTED)
def test_harbor_with_its_docker_environment_gives_the_same_rewards(kind: str, tmp_path: Path) -> None:
    require_harbor()
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0:
        missing(
            "needs Docker Compose 2 (docker compose version): https://docs.docker.com/compose/install/linux/, or the "
            "package docker-compose of Debian 13, docker-compose-v2 of Ubuntu"
        )
    containers, sandboxes, output = tmp_path / "containers", tmp_path / "sandboxes", tmp_path / "output"
    output.mkdir()
    solutions = copy_tasks(containers, list(SOLVED), kind, into_images=True)
    expected = EXPECTED[kind]
    assert play_in_harbor(containers, output) == expected
    assert play_here(containers, solutions) == expected
    solutions = copy_tasks(sandboxes, list(IN_A_SANDBOX), kind, into_images=False)
    assert play_here(sandboxes, solutions) == {name: expected[name] for name in IN_A_SANDBOX}
