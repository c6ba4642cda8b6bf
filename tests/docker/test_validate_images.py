"""`ropewalk validate IMAGE`: a good image passes everything, a bad one is told what is wrong."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openenv_core.providers.docker import Engine

ROOT = Path(__file__).parents[2]
GOOD = "ropewalk-test-validate:latest"
BAD = "ropewalk-test-validate-bad:latest"

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def good(engine: Engine) -> Iterator[str]:
    done = ropewalk("build", "envs/blackjack_env", "--tag", GOOD)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    yield GOOD
    _remove(GOOD)


@pytest.fixture(scope="module")
def bad(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "Dockerfile").write_text('FROM python:3.11-slim\nCMD ["sleep", "3600"]\n')
    subprocess.run(["docker", "build", "-t", BAD, str(folder)], capture_output=True, timeout=300, check=True)
    yield BAD
    _remove(BAD)


def test_a_good_image_passes_every_level(good: str) -> None:
    done = ropewalk("validate", good, "--json")
    results = {one["check"]: one for one in json.loads(done.stdout)["results"]}
    assert done.returncode == 0, [one for one in results.values() if one["status"] in ("failed", "crashed")]
    passed = {name for name, one in results.items() if one["status"] == "passed"}
    assert passed >= {"image_user", "image_health", "image_port", "image_size"}
    assert "reward_in_range" in passed  # the range is in the manifest, which is in the image
    assert passed >= {"episode_ends", "same_seed_same_episode", "kill_and_restart", "sessions_at_once"}
    assert not containers(good)


def test_a_bad_image_is_told_what_is_wrong(bad: str) -> None:
    words = ["--level", "static", "--check", "health", "--start-timeout", "3", "--json"]
    done = ropewalk("validate", bad, *words)
    assert done.returncode == 1, done.stderr
    results = {one["check"]: one for one in json.loads(done.stdout)["results"]}
    failed = {name for name, one in results.items() if one["status"] in ("failed", "crashed")}
    assert failed == {"image_user", "image_health", "image_port", "health"}
    assert all(results[name]["change"] for name in failed)
    assert not containers(bad)


def test_an_image_that_is_not_there_is_status_2(engine: Engine) -> None:
    done = ropewalk("validate", "ropewalk-test-no-such-image:latest")
    assert done.returncode == 2
    assert "ropewalk build" in done.stderr


def containers(image: str) -> list[Any]:
    return [one for one in Engine.find().labelled("ropewalk.owner") if one["Image"] == image]


def ropewalk(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "openenv_core.cli", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def _remove(image: str) -> None:
    subprocess.run(["docker", "image", "rm", "--force", image], capture_output=True, timeout=60, check=True)
