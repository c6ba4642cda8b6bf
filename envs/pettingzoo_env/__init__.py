"""Any PettingZoo environment as an OpenEnv environment: the models and the client. The server is in :mod:`.server`."""

from .client import PettingZooEnv
from .models import PettingZooAction, PettingZooObservation

__all__ = ["PettingZooAction", "PettingZooEnv", "PettingZooObservation"]
