"""The client of a server with a PettingZoo environment."""

from openenv_core import EnvClient, State

from .models import PettingZooAction, PettingZooObservation


class PettingZooEnv(EnvClient[PettingZooAction, PettingZooObservation, State]):
    """A session with one agent, or several: `reset` takes them as `seat` (docs/players.md)."""

    action_type = PettingZooAction
    observation_type = PettingZooObservation
    state_type = State
    # The package is named envs.pettingzoo_env in this repository and pettingzoo_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
