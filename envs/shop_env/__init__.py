"""The customer desk of a shop as an environment: the models and the client. The server is in :mod:`.server`.

What plays it by itself is in :mod:`.solver` and :mod:`.baselines`.
"""

from .client import ShopEnv
from .models import ImpossibleRequestError, InvalidResetOptionError, ShopObservation, ShopState

__all__ = ["ImpossibleRequestError", "InvalidResetOptionError", "ShopEnv", "ShopObservation", "ShopState"]
