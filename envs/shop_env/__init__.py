"""The customer desk of a shop as an environment: the models and the client. The server is in :mod:`.server`.

What plays it by itself is in :mod:`.solver` and :mod:`.baselines`.
"""

from .client import ShopEnv
from .errors import Impossible, InvalidResetOption
from .models import ShopObservation, ShopState

__all__ = ["Impossible", "InvalidResetOption", "ShopEnv", "ShopObservation", "ShopState"]
