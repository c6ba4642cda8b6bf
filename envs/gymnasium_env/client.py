"""The client of a Gymnasium environment; actions and observations are JSON values."""

from openenv_core import EnvClient

from .models import GymnasiumAction, GymnasiumObservation, GymnasiumState


class GymnasiumEnv(EnvClient[GymnasiumAction, GymnasiumObservation, GymnasiumState]):
    """A session on a Gymnasium environment's server; `ServedEnv` does the same with numpy values."""

    action_type = GymnasiumAction
    observation_type = GymnasiumObservation
    state_type = GymnasiumState
    default_app = f"{__package__}.server.app:app"
