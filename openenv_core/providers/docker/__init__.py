"""Servers in Docker containers."""

from openenv_core.providers.docker.container import (
    Container,
    LocalDockerProvider,
    start_container,
)
from openenv_core.providers.docker.engine import DockerEngine
from openenv_core.providers.docker.options import ContainerOptions

__all__ = [
    "Container",
    "ContainerOptions",
    "DockerEngine",
    "LocalDockerProvider",
    "start_container",
]
