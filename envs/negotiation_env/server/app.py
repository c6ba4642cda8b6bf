"""The ASGI app: `uvicorn envs.negotiation_env.server.app:app`."""

from servers import create_app

from .environment import NegotiationEnvironment

app = create_app(NegotiationEnvironment, env_name="negotiation")
