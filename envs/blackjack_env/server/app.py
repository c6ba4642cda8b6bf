"""The ASGI app: `uvicorn envs.blackjack_env.server.app:app`."""

from servers import create_app

from ..models import BlackjackAction, BlackjackObservation, BlackjackState
from .environment import BlackjackEnvironment

# A session takes a few kilobytes, and a trainer plays hundreds of hands at once.
MAX_CONCURRENT_ENVS = 1024

app = create_app(
    BlackjackEnvironment,
    BlackjackAction,
    BlackjackObservation,
    env_name="blackjack",
    max_concurrent_envs=MAX_CONCURRENT_ENVS,
    state_cls=BlackjackState,
)
