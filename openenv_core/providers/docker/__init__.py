"""Servers in containers of a Docker engine."""

from openenv_core.providers.docker.container import Container, ContainerState, ContainerStats, start_container
from openenv_core.providers.docker.engine import DockerEngine
from openenv_core.providers.docker.options import ContainerOptions
from openenv_core.providers.docker.provider import LocalDockerProvider

__all__ = [
    "Container",
    "ContainerOptions",
    "ContainerState",
    "ContainerStats",
    "DockerEngine",
    "LocalDockerProvider",
    "start_container",
]
