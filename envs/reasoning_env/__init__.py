"""The tasks of reasoning-gym as an environment: the models and the client. The server is in :mod:`.server`."""

from openenv_core.tasks import InvalidResetOptionError

from .client import ReasoningEnv
from .models import ReasoningAction, ReasoningObservation, ReasoningState

__all__ = [
    "InvalidResetOptionError",
    "ReasoningAction",
    "ReasoningEnv",
    "ReasoningObservation",
    "ReasoningState",
]
