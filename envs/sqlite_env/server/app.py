"""The ASGI app: `ropewalk serve sqlite`, or `uvicorn envs.sqlite_env.server.app:app`."""

from openenv_core.tools import ToolAction, ToolObservation
from servers import create_app

from ..models import SqliteObservation, SqliteState
from .environment import SqliteEnvironment

# A session holds an in-memory database of about 100 kB.
MAX_CONCURRENT_ENVS = 1024

app = create_app(
    SqliteEnvironment,
    ToolAction,
    ToolObservation,
    env_name="sqlite",
    max_concurrent_envs=MAX_CONCURRENT_ENVS,
    state_cls=SqliteState,
    reset_observation_cls=SqliteObservation,
)
