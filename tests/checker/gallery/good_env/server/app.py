"""The ASGI app."""

from servers import create_app

from ..models import Guess, GuessState, Hint
from .environment import GuessEnvironment

app = create_app(GuessEnvironment, Guess, Hint, env_name="good", max_concurrent_envs=32, state_cls=GuessState)
