"""The ASGI app: `uvicorn envs.kuhn_env.server.app:app`."""

from servers import create_app

from .environment import KuhnEnvironment

app = create_app(KuhnEnvironment, env_name="kuhn")
