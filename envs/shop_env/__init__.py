"""The customer desk of a shop as an environment: the models and the client. The server is in :mod:`.server`."""

from openenv_core.tasks import InvalidResetOptionError

from .client import ShopEnv
from .models import ShopObservation, ShopState

__all__ = ["InvalidResetOptionError", "ShopEnv", "ShopObservation", "ShopState"]
