"""A container a session, from a warm pool; its image serves a coding environment."""

from collections.abc import Mapping

from .interpreter import ContainerBackend
from .settings import ContainerSettings

__all__ = ["ContainerBackend", "ContainerSettings", "backend_from_environment"]


def backend_from_environment(environ: Mapping[str, str]) -> ContainerBackend:
    """Return the backend that environment variables describe; see `ContainerSettings`.

    Raises:
        ConfigurationError: There is no image, or a value cannot be.
    """
    return ContainerBackend(ContainerSettings.from_environment(environ))
