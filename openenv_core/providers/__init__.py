"""Providers, which start and stop servers for clients."""

from typing import TYPE_CHECKING

from openenv_core.errors import make_lazy_getattr
from openenv_core.providers.base import AnyProvider, Provider

if TYPE_CHECKING:
    from openenv_core.providers.claims import ClaimFleet
    from openenv_core.providers.docker import ContainerOptions, LocalDockerProvider
    from openenv_core.providers.docker.fleet import DockerFleet
    from openenv_core.providers.fleet import ServerFleet
    from openenv_core.providers.kubernetes import KubernetesFleet
    from openenv_core.providers.pool import DockerPool
    from openenv_core.providers.process import LocalProcessProvider
    from openenv_core.providers.ray import RayFleet
    from openenv_core.providers.remote import RemoteSandboxProvider

__all__ = [
    "AnyProvider",
    "ClaimFleet",
    "ContainerOptions",
    "DockerFleet",
    "DockerPool",
    "KubernetesFleet",
    "LocalDockerProvider",
    "LocalProcessProvider",
    "Provider",
    "RayFleet",
    "RemoteSandboxProvider",
    "ServerFleet",
]

__getattr__ = make_lazy_getattr(
    globals(),
    {
        "ClaimFleet": "openenv_core.providers.claims",
        "ContainerOptions": "openenv_core.providers.docker",
        "DockerFleet": "openenv_core.providers.docker.fleet",
        "DockerPool": "openenv_core.providers.pool",
        "KubernetesFleet": "openenv_core.providers.kubernetes",
        "LocalDockerProvider": "openenv_core.providers.docker",
        "LocalProcessProvider": "openenv_core.providers.process",
        "RayFleet": "openenv_core.providers.ray",
        "RemoteSandboxProvider": "openenv_core.providers.remote",
        "ServerFleet": "openenv_core.providers.fleet",
    },
)


def __dir__() -> list[str]:
    return [name for name in globals() if name.startswith("__")] + __all__
