"""Providers, which start and stop servers for clients."""

from typing import TYPE_CHECKING

from openenv_core.errors import make_lazy_getattr
from openenv_core.providers.base import AnyProvider, Provider

if TYPE_CHECKING:
    from openenv_core.providers.docker import ContainerOptions, LocalDockerProvider
    from openenv_core.providers.pool import DockerPool
    from openenv_core.providers.process import LocalProcessProvider
    from openenv_core.providers.remote import RemoteSandboxProvider

__all__ = [
    "AnyProvider",
    "ContainerOptions",
    "DockerPool",
    "LocalDockerProvider",
    "LocalProcessProvider",
    "Provider",
    "RemoteSandboxProvider",
]

__getattr__ = make_lazy_getattr(
    globals(),
    {
        "ContainerOptions": "openenv_core.providers.docker",
        "DockerPool": "openenv_core.providers.pool",
        "LocalDockerProvider": "openenv_core.providers.docker",
        "LocalProcessProvider": "openenv_core.providers.process",
        "RemoteSandboxProvider": "openenv_core.providers.remote",
    },
)


def __dir__() -> list[str]:
    return [name for name in globals() if name.startswith("__")] + __all__
