"""The folder as a distribution, and a task over the wire."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

from envs.shop_env import ShopEnv, ShopObservation
from envs.shop_env.solver import solve
from openenv_core.tools import CallToolAction, CallToolObservation

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "envs" / "shop_env"


def test_the_distribution_names_every_package_of_the_folder() -> None:
    told = tomllib.loads((FOLDER / "pyproject.toml").read_text())["tool"]["setuptools"]
    there = {file.parent.relative_to(FOLDER) for file in FOLDER.rglob("*.py")}
    names = {".".join(("shop_env", *folder.parts)) for folder in there}
    assert set(told["packages"]) == names == set(told["package-dir"])


def test_the_callers_side_loads_no_server_and_no_shop() -> None:
    command = (
        "import sys, envs.shop_env\n"
        "print([m for m in ('fastapi', 'servers', 'envs.shop_env.world') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.soak
def test_the_readme_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), flags=re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "0.0 True", done.stderr


def test_tasks_over_the_wire() -> None:
    with ShopEnv.from_process() as env:

        def call(name: str, arguments: dict[str, object]) -> CallToolObservation:
            seen = env.step(CallToolAction(tool_name=name, arguments=arguments)).observation
            assert isinstance(seen, CallToolObservation)
            return seen

        for index in range(3):
            seen = env.reset(split="test", index=index).observation
            assert isinstance(seen, ShopObservation)
            assert solve(seen.task, call) == 1.0
            assert env.state().done
        told = httpx.post(f"{env.base_url}/shop/task", json={"split": "test", "index": 2}, timeout=10)
        assert told.json()["task"]["task"] == seen.task, told.text
