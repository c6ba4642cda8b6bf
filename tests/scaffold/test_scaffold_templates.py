"""Every template, made, and then treated as its author would: its own tests, the checker, an image, the checker."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_engine import engine
from module_run import finished
from released import ROOT

from openenv_core import GenericEnvClient
from openenv_core.providers.docker import DockerEngine
from openenv_core.scaffold.making import TEMPLATES, make
from openenv_core.scaffold.names import names_of

__all__ = ["engine"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PLAYED = {
    "game": {"guess": 5},
    "tools": {"tool_name": "look", "arguments": {"shelf": "north"}},
    "gymnasium": {"action": 1},
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "game" else pytest.mark.soak) for name in TEMPLATES],
)
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(template: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(names_of(f"made-from-{template}"), template, tmp_path_factory.mktemp(template))


@pytest.fixture
def image(engine: DockerEngine, folder: Path) -> Iterator[str]:
    tag = f"ropewalk-test-{folder.name}:latest".replace("_", "-")
    run("build", str(folder), "--tag", tag, cwd=folder)
    yield tag
    subprocess.run(["docker", "image", "rm", "--force", tag], capture_output=True, timeout=60, check=True)


def run(*words: str, cwd: Path, module: str = "openenv_core.cli") -> str:
    """Run a command as in a new shell, and return what it printed."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    variables |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = finished(sys.executable, "-m", module, *words, cwd=cwd, env=variables, timeout_s=600)
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def assert_all_passed(report: str) -> None:
    results = json.loads(report)["results"]
    assert {result["status"] for result in results} <= {"passed", "skipped"}
    levels = {result["level"] for result in results if result["status"] == "passed"}
    assert levels >= {"runtime", "semantic", "load"}


def test_own_tests_pass_and_the_environment_is_served(folder: Path, template: str) -> None:
    # Leaks over a thousand episodes are looked for in the third tier, by all levels.
    output = run("-q", "-p", "no:cacheprovider", "-k", "not level", cwd=folder, module="pytest")
    assert "failed" not in output
    assert "passed" in output
    with GenericEnvClient.from_process(str(folder)) as env:
        assert not env.reset(seed=7).done
        assert 0 <= (env.step(PLAYED[template]).reward or 0) <= 1
        assert env.state()["step_count"] == 1


@pytest.mark.soak
def test_made_environment_passes_every_level(folder: Path) -> None:
    assert_all_passed(run("validate", ".", "--json", cwd=folder))


@pytest.mark.soak
@pytest.mark.docker
def test_image_of_a_made_environment_passes(image: str, folder: Path) -> None:
    report = run("validate", image, "--json", cwd=folder.parent)
    assert_all_passed(report)
