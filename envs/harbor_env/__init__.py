"""A folder of Harbor tasks as an environment: the models and the client. The server is in :mod:`.server`."""

from openenv_core.tasks import InvalidResetOptionError

from .client import HarborEnv
from .models import (
    EditFile,
    HarborAction,
    HarborObservation,
    HarborState,
    ReadFile,
    Run,
    Submit,
    WriteFile,
)

__all__ = [
    "EditFile",
    "HarborAction",
    "HarborEnv",
    "HarborObservation",
    "HarborState",
    "InvalidResetOptionError",
    "ReadFile",
    "Run",
    "Submit",
    "WriteFile",
]
