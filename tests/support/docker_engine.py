"""The Docker engine that tests use, and images made for them."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from missing import missing

from openenv_core.errors import EngineUnavailableError
from openenv_core.providers.docker import DockerEngine

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "docker-engine"
BASE = "python:3.11-slim"
HOW_TO = "start one: scripts/docker-engine start (root), or let DOCKER_HOST name one"
START_TIMEOUT_S = 1500

HOSTILE = ROOT / "tests" / "docker" / "hostile"
HOSTILE_TAG = "ropewalk-test-hostile:latest"
CONTENT = "ropewalk-test.content"
"""Label with the digest of an image's build context."""


def engine_answers() -> bool:
    try:
        engine = DockerEngine.find()
        engine.ping()
        return engine.has_image(BASE)
    except EngineUnavailableError:
        return False


def started_engine() -> bool:
    """Start an engine if none runs; return whether this call started it. Skips the test if it cannot be started."""
    running = True
    try:
        DockerEngine.find().ping()
    except EngineUnavailableError as error:
        running = False
        if os.geteuid() != 0 and not os.environ.get("CI"):
            pytest.skip(f"needs a Docker engine ({error}); {HOW_TO}")
    if not engine_answers():
        done = subprocess.run(
            [SCRIPT, "start"], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            missing(f"needs a Docker engine with {BASE}, and could not start one:\n{done.stderr}")
    return not running


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerEngine]:
    """A Docker engine that has the base image of our Dockerfiles."""
    started = started_engine()
    yield DockerEngine.find()
    if started:
        subprocess.run([SCRIPT, "stop"], check=True, timeout=60)


@pytest.fixture(scope="session")
def hostile_image(engine: DockerEngine) -> str:
    """An image whose environment misbehaves on request: allocates memory, forks, connects out, writes, exits.

    See tests/docker/hostile/hostile.py for the actions, and for HOSTILE_START, which makes it misbehave on start-up.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        _lay_out(context)
        content = digest_of(context)
        if content_of(engine, HOSTILE_TAG) != content:
            run_build(context, HOSTILE_TAG, content)
    return HOSTILE_TAG


def _lay_out(context: Path) -> None:
    for name in ("Dockerfile", "hostile.py"):
        shutil.copy(HOSTILE / name, context)
    shutil.copy(ROOT / "constraints" / "test.txt", context / "constraints.txt")
    ours = context / "ropewalk"
    ours.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, ours)
    unneeded = shutil.ignore_patterns("__pycache__", "*.pyc", "scaffold", "checker", "images", "play")
    for package in ("openenv_core", "servers"):
        shutil.copytree(ROOT / package, ours / package, ignore=unneeded)


def digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def content_of(engine: DockerEngine, tag: str) -> str | None:
    if not engine.has_image(tag):
        return None
    config = engine.call("GET", f"/images/{tag}/json")["Config"]
    return str((config.get("Labels") or {}).get(CONTENT))


def run_build(context: Path, tag: str, content: str) -> None:
    command = ["docker", "build", "--force-rm", "-t", tag, "--label", f"{CONTENT}={content}", str(context)]
    # A distribution's docker command may default to BuildKit without including it.
    buildx = subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode == 0
    environment = {**os.environ, "DOCKER_BUILDKIT": "1" if buildx else "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    if done.returncode != 0:
        pytest.fail(f"could not build {tag}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}", pytrace=False)
