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

LEAK = """

import functools as _functools
import os as _os

_PAST = []
_reset = BlackjackEnvironment.reset


@_functools.wraps(_reset)
def _leaking(*values, **options):
    _PAST.append(_os.urandom(4000) if _os.environ["KIND"] == "memory" else open("/dev/null"))
    return _reset(*values, **options)


BlackjackEnvironment.reset = _leaking
"""

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def good(engine: Engine) -> Iterator[str]:
    done = ropewalk("build", "envs/blackjack_env", "--tag", GOOD)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    yield GOOD
    _remove(GOOD)


@pytest.fixture(scope="module")
def leaking(good: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield a repository whose tags leak what they are called after, once an episode."""
    folder = tmp_path_factory.mktemp("leaking")
    (folder / "leak.py").write_text(LEAK)
    (folder / "Dockerfile").write_text(
        f"FROM {good}\nARG KIND\nENV KIND=${{KIND}}\nUSER root\nCOPY leak.py /tmp/leak.py\n"
        "RUN cat /tmp/leak.py >> $(python -c 'import blackjack_env.server.environment as e; print(e.__file__)')\n"
        "USER env\n"
    )
    name = GOOD.partition(":")[0] + "-leaking"
    for kind in ("memory", "files"):
        command = ["docker", "build", "-t", f"{name}:{kind}", "--build-arg", f"KIND={kind}", str(folder)]
        subprocess.run(command, capture_output=True, timeout=300, check=True)
    yield name
    for kind in ("memory", "files"):
        _remove(f"{name}:{kind}")


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
    assert passed >= {"threads_stay_level", "files_stay_level", "memory_stays_level"}
    assert passed >= {"episode_ends", "same_seed_same_episode", "kill_and_restart", "sessions_at_once"}
    assert not containers(good)


@pytest.mark.soak
def test_what_an_image_leaks_is_seen_from_inside(leaking: str) -> None:
    words = ["--check", "threads_stay_level", "--check", "files_stay_level", "--check", "memory_stays_level"]
    told = {}
    for kind in ("memory", "files"):
        done = ropewalk("validate", f"{leaking}:{kind}", *words, "--episodes", "200", "--json")
        told[kind] = {one["check"]: one["status"] for one in json.loads(done.stdout)["results"]}
    level, leaks = "passed", "failed"
    assert told["memory"] == {
        "threads_stay_level": level,
        "files_stay_level": level,
        "memory_stays_level": leaks,
    }
    assert told["files"]["files_stay_level"] == leaks


@pytest.mark.soak
def test_a_bad_image_is_told_what_is_wrong(bad: str) -> None:
    words = ["--level", "static", "--check", "health", "--start-timeout", "3", "--json"]
    done = ropewalk("validate", bad, *words)
    assert done.returncode == 1, done.stderr
    results = {one["check"]: one for one in json.loads(done.stdout)["results"]}
    failed = {name for name, one in results.items() if one["status"] in ("failed", "crashed")}
    assert failed == {"image_user", "image_health", "image_port", "health"}
    assert all(results[name]["change"] for name in failed)
    assert not containers(bad)


@pytest.mark.soak
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
