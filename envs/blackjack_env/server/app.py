"""The ASGI app: `uvicorn envs.blackjack_env.server.app:app`."""

from servers import create_app

from .environment import BlackjackEnvironment

app = create_app(BlackjackEnvironment, env_name="blackjack")
