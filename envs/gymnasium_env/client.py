"""The client of an environment of Gymnasium's, with values of its spaces as JSON."""

from openenv_core import EnvClient

from .models import GymnasiumAction, GymnasiumObservation, GymnasiumState


class GymnasiumEnv(EnvClient[GymnasiumAction, GymnasiumObservation, GymnasiumState]):
    """Plays what a server of `envs/gymnasium_env` serves; `ServedEnv` does so with numpy's values."""

    action_type = GymnasiumAction
    observation_type = GymnasiumObservation
    state_type = GymnasiumState
    default_app = f"{__package__}.server.app:app"
