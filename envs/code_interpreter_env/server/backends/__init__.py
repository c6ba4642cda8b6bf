"""The backends that run code: the local sandbox, or a hosted one, chosen by name."""

from importlib import import_module
from os import environ
from typing import Final

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import Backend, Isolation

from ..settings import LOCAL, PREFIX, InterpreterSettings

HOSTED: Final = ("containers", "jupyter", "together")
"""Modules of this package with a function `backend_from_environment(environ)`."""


def make_backend(settings: InterpreterSettings, minimum: Isolation) -> Backend:
    """Return the backend that the settings name, not started."""
    name = settings.backend
    if name == LOCAL:
        from .local import LocalBackend

        return LocalBackend(settings, minimum)
    if name not in HOSTED:
        raise ConfigurationError(
            f"expected {PREFIX}BACKEND to be {', '.join((LOCAL, *HOSTED))}, got {name!r}"
        )
    hosted = import_module(f".{name}", __name__)
    backend: Backend = hosted.backend_from_environment(environ)
    return backend
