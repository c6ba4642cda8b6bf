"""The client of a Kuhn poker server."""

from openenv_core import EnvClient, State

from .models import KuhnAction, KuhnObservation


class KuhnEnv(EnvClient[KuhnAction, KuhnObservation, State]):
    """A session on a Kuhn poker server: `reset` takes the seats that it plays, as `seat` (docs/players.md)."""

    action_type = KuhnAction
    observation_type = KuhnObservation
    state_type = State
    # The package is named envs.kuhn_env in this repository and kuhn_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
