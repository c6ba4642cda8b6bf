"""The backends that run code: the local sandbox, or Together's service, chosen by name."""

from os import environ
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import Backend, Isolation

from ..settings import LOCAL, PREFIX, InterpreterSettings

TOGETHER: Final = "together"


def make_backend(settings: InterpreterSettings, minimum: Isolation) -> Backend:
    """Return the backend that the settings name, not started.

    Raises:
        ConfigurationError: There is no backend of that name, or its variables are invalid.
    """
    if settings.backend == LOCAL:
        from .local import LocalBackend

        return LocalBackend(settings, minimum)
    if settings.backend == TOGETHER:
        from .together import backend_from_environment

        return backend_from_environment(environ)
    raise ConfigurationError(
        f"expected {PREFIX}BACKEND to be {LOCAL} or {TOGETHER}, got {settings.backend!r}"
    )
