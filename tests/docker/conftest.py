"""Fixtures of container tests: an engine, its client, and images that are built once."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker_engine import engine, hostile_image

from openenv_core.cli.main import main
from openenv_core.providers.docker import DockerEngine

__all__ = ["engine", "hostile_image"]

ROOT = Path(__file__).parents[2]
BLACKJACK = "ropewalk-test-blackjack:latest"


@pytest.fixture(scope="session")
def api(engine: DockerEngine) -> Iterator[docker.APIClient]:
    client = docker.APIClient(base_url=engine.address.url)
    yield client
    client.close()


@pytest.fixture(scope="session")
def blackjack(engine: DockerEngine) -> Iterator[str]:
    """BlackJack's image, based on our base image."""
    assert main(["build", str(ROOT / "envs" / "blackjack_env"), "--tag", BLACKJACK]) == 0
    yield BLACKJACK
    subprocess.run(
        ["docker", "image", "rm", "--force", BLACKJACK], capture_output=True, timeout=60, check=True
    )
