"""The ASGI app: `ropewalk serve place_holder_env`, or `uvicorn place_holder_env.server.app:app`."""

from openenv_core.tools import ToolAction, ToolObservation
from servers import create_app

from ..models import PlaceHolderObservation, PlaceHolderState
from .environment import PlaceHolderEnvironment

# Maximum of concurrent sessions; each has its own environment.
MAX_CONCURRENT_ENVS = 256

app = create_app(
    PlaceHolderEnvironment,
    ToolAction,
    ToolObservation,
    env_name="place_holder",
    max_concurrent_envs=MAX_CONCURRENT_ENVS,
    state_cls=PlaceHolderState,
    reset_observation_cls=PlaceHolderObservation,
)
