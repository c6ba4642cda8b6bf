"""The client of a BlackJack server."""

from openenv_core import EnvClient

from .models import BlackjackAction, BlackjackObservation, BlackjackState


class BlackjackEnv(EnvClient[BlackjackAction, BlackjackObservation, BlackjackState]):
    """A session on a BlackJack server.

    Besides `seed` and `episode_id`, `reset` takes the options `natural` (bool) and `sab` (bool); see
    :class:`.server.environment.BlackjackEnvironment`.
    """

    action_type = BlackjackAction
    observation_type = BlackjackObservation
    state_type = BlackjackState
    # The package is named envs.blackjack_env in this repository and blackjack_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
