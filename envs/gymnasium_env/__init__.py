"""Any environment of Gymnasium's behind a server; `openenv_core.adapters.gymnasium.ServedEnv` takes it back."""

from .client import GymnasiumEnv
from .models import GymnasiumAction, GymnasiumObservation, GymnasiumState

__all__ = ["GymnasiumAction", "GymnasiumEnv", "GymnasiumObservation", "GymnasiumState"]
