"""Code that a model wrote, run in an interpreter with state: the models and the client.

The server is in :mod:`.server`.
"""

from openenv_core.tasks import InvalidResetOptionError

from .client import CodeInterpreterEnv
from .models import (
    CodeInterpreterAction,
    CodeInterpreterObservation,
    CodeInterpreterState,
    CodeObservation,
    Execute,
    FileContent,
    GetFile,
    PutFile,
    Restart,
    Submit,
)

__all__ = [
    "CodeInterpreterAction",
    "CodeInterpreterEnv",
    "CodeInterpreterObservation",
    "CodeInterpreterState",
    "CodeObservation",
    "Execute",
    "FileContent",
    "GetFile",
    "InvalidResetOptionError",
    "PutFile",
    "Restart",
    "Submit",
]
