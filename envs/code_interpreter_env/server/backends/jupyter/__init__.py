"""Kernels behind a Jupyter kernel gateway, or a Jupyter server. A gateway isolates nothing."""

from collections.abc import Mapping

from .interpreter import JupyterBackend
from .settings import JupyterSettings

__all__ = ["JupyterBackend", "JupyterSettings", "backend_from_environment"]


def backend_from_environment(environ: Mapping[str, str]) -> JupyterBackend:
    """Return the backend that environment variables describe; see `JupyterSettings`.

    Raises:
        ConfigurationError: There is no URL, or a value cannot be.
    """
    return JupyterBackend(JupyterSettings.from_environment(environ))
