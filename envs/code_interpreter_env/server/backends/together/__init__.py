"""Together's Code Interpreter as it is documented. It has never been run against the service itself."""

from collections.abc import Mapping

from .interpreter import TogetherBackend
from .settings import TogetherSettings

__all__ = ["TogetherBackend", "TogetherSettings", "backend_from_environment"]


def backend_from_environment(environ: Mapping[str, str]) -> TogetherBackend:
    """Return the backend that environment variables describe; see `TogetherSettings`.

    Raises:
        ConfigurationError: There is no token, or a value cannot be.
    """
    return TogetherBackend(TogetherSettings.from_environment(environ))
