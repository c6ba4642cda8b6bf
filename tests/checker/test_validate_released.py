"""A folder that the released package's own `init` makes: looked at without a crash, with findings that are true."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from released import ROOT, environment, released_server, scaffold

pytestmark = [pytest.mark.interop, pytest.mark.soak, pytest.mark.timeout(600)]

TRUE = {"dockerfile_user", "dockerfile_port", "episode_ends"}
"""It runs as root, exposes no port, and has no end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scaffold("0.10.0", tmp_path_factory.mktemp("released"))


def test_the_released_scaffold_is_validated(folder: Path) -> None:
    statuses = validate(str(folder), "--level", "static", "--level", "runtime")
    assert {name for name, status in statuses.items() if status == "failed"} == TRUE
    assert "crashed" not in statuses.values()


def test_a_server_of_the_released_package_is_validated(folder: Path) -> None:
    with released_server("0.10.0", "walk_env.server.app:app", folder.parent) as url:
        statuses = validate(url, "--level", "static", "--level", "runtime")
    assert "crashed" not in statuses.values()
    assert statuses["observations_follow_schema"] == "passed"
    assert statuses["episode_ends"] == "failed"


def validate(*words: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "openenv_core.cli", "validate", *words, "--json"],
        cwd="/",
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return {one["check"]: one["status"] for one in json.loads(done.stdout)["results"]}
