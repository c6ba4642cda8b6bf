"""Place Holder as an environment: the models and the client. The server is in :mod:`.server`."""

from .client import PlaceHolderEnv
from .models import PlaceHolderAction, PlaceHolderObservation

__all__ = ["PlaceHolderAction", "PlaceHolderEnv", "PlaceHolderObservation"]
