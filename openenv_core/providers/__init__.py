"""Providers, which start and stop servers for clients."""

from typing import TYPE_CHECKING, Final

from openenv_core.errors import make_lazy_getattr
from openenv_core.providers.base import AnyProvider, Provider

if TYPE_CHECKING:
    from openenv_core.providers.claims import ClaimFleet as ClaimFleet
    from openenv_core.providers.docker import ContainerOptions as ContainerOptions
    from openenv_core.providers.docker import LocalDockerProvider as LocalDockerProvider
    from openenv_core.providers.docker.fleet import DockerFleet as DockerFleet
    from openenv_core.providers.fleet import ServerFleet as ServerFleet
    from openenv_core.providers.kubernetes import KubernetesFleet as KubernetesFleet
    from openenv_core.providers.pool import DockerPool as DockerPool
    from openenv_core.providers.process import LocalProcessProvider as LocalProcessProvider
    from openenv_core.providers.ray import RayFleet as RayFleet
    from openenv_core.providers.remote import RemoteSandboxProvider as RemoteSandboxProvider

_LAZY: Final = {
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
}

__all__ = ["AnyProvider", "Provider", *_LAZY]
__getattr__ = make_lazy_getattr(globals(), _LAZY)


def __dir__() -> list[str]:
    return [name for name in globals() if name.startswith("__")] + __all__
