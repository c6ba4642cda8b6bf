"""The ASGI app: `ropewalk serve place_holder_env`, or `uvicorn place_holder_env.server.app:app`."""

from servers import create_app

from .environment import PlaceHolderEnvironment

app = create_app(PlaceHolderEnvironment, env_name="place_holder")
