"""The ASGI app: `ropewalk serve place_holder_env`, or `uvicorn place_holder_env.server.app:app`."""

from servers import create_app

from ..models import PlaceHolderAction, PlaceHolderObservation, PlaceHolderState
from .environment import PlaceHolderEnvironment

# Maximum of concurrent sessions; each has its own environment.
MAX_CONCURRENT_ENVS = 256

app = create_app(
    PlaceHolderEnvironment,
    PlaceHolderAction,
    PlaceHolderObservation,
    env_name="place_holder",
    max_concurrent_envs=MAX_CONCURRENT_ENVS,
    state_cls=PlaceHolderState,
)
