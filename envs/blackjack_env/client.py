"""The client of a BlackJack server."""

from openenv_core import EnvClient

from .models import BlackjackAction, BlackjackObservation, BlackjackState


class BlackjackEnv(EnvClient[BlackjackAction, BlackjackObservation, BlackjackState]):
    """Plays at a BlackJack table behind a server.

    `reset` takes, besides `seed` and `episode_id`, the options `natural` (bool) and `sab` (bool); see
    :class:`.server.environment.BlackjackEnvironment`.
    """

    action_type = BlackjackAction
    observation_type = BlackjackObservation
    state_type = BlackjackState
    # The folder goes by two names, envs.blackjack_env here and blackjack_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
