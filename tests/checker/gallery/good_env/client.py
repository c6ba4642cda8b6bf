"""The client."""

from openenv_core import EnvClient

from .models import Guess, GuessState, Hint


class GuessEnv(EnvClient[Guess, Hint, GuessState]):
    """Guesses at a server."""

    action_type = Guess
    observation_type = Hint
    state_type = GuessState
    default_app = f"{__package__}.server.app:app"
