"""The ASGI app: `ropewalk serve sqlite`, or `uvicorn envs.sqlite_env.server.app:app`."""

from servers import create_app

from ..models import SqliteObservation
from .environment import SqliteEnvironment

app = create_app(SqliteEnvironment, env_name="sqlite", reset_observation_cls=SqliteObservation)
