"""A folder made by the released package's `init`: served, checked and built; its faults are reported."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from module_run import finished
from released import ROOT, environment, exchange, released_server, scaffold

from openenv_core.client import GenericEnvClient
from openenv_core.providers.docker import DockerEngine, LocalDockerProvider

VERSION = "0.10.0"
IMAGE = "ropewalk-test-released-scaffold:latest"

START_TIMEOUT_S = 300.0
"""The released package is compiled at every start, where nothing can be written beside it."""

pytestmark = [pytest.mark.interop, pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scaffold(VERSION, tmp_path_factory.mktemp("released"))


@pytest.fixture(scope="module")
def image(engine: DockerEngine, folder: Path) -> Iterator[str]:
    done = ropewalk("build", str(folder), "--tag", IMAGE)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    yield IMAGE
    subprocess.run(["docker", "image", "rm", "--force", IMAGE], capture_output=True, timeout=60, check=True)


def ropewalk(*words: str) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-m", "openenv_core.cli", *words)
    return finished(*command, env=environment(PYTHONPATH=str(ROOT)), cwd=ROOT, timeout_s=600)


def findings(target: str, *options: str) -> dict[str, dict[str, Any]]:
    """Return the findings of the checker on a target; none of its checks may crash."""
    done = ropewalk("validate", target, "--json", "--start-timeout", str(START_TIMEOUT_S), *options)
    assert done.returncode == 1, done.stdout[-6000:] + done.stderr[-6000:]
    results = json.loads(done.stdout)["results"]
    assert {result["status"] for result in results} == {"passed", "failed", "skipped"}
    failed = {result["check"]: result for result in results if result["status"] == "failed"}
    assert all(result["message"] and result["change"] for result in failed.values())
    return failed


def test_faults_of_the_folder_are_reported(folder: Path) -> None:
    failed = findings(str(folder))
    # Its seed decides nothing, its episodes never end, and it never says so.
    assert set(failed) >= {"different_seeds_differ", "episode_ends"}
    assert "seed" in failed["different_seeds_differ"]["change"]


def test_a_server_of_the_released_package_is_validated(folder: Path) -> None:
    with released_server(VERSION, "walk_env.server.app:app", folder.parent) as url:
        failed = findings(url, "--level", "static", "--level", "runtime")
    assert "episode_ends" in failed
    assert "replies_follow_schema" not in failed


@pytest.mark.docker
def test_released_image_builds_answers_and_its_faults_are_reported(image: str) -> None:
    with LocalDockerProvider(image, start_timeout_s=START_TIMEOUT_S) as provider:
        url = provider.start()  # the same one again
        assert exchange(url, "GET", "/health") == (200, {"status": "healthy"})
        with GenericEnvClient(url).sync() as client:
            client.reset()
            assert client.step({"message": "hello"}).observation["echoed_message"] == "hello"
    # The other levels start its server again and again, which takes the released package ten seconds each time.
    levels = [word for level in ("static", "runtime", "semantic") for word in ("--level", level)]
    assert set(findings(image, *levels)) >= {"different_seeds_differ", "episode_ends"}
