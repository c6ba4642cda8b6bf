"""The ASGI app: `uvicorn envs.reasoning_env.server.app:app`."""

from servers import create_app

from ..models import ReasoningAction, ReasoningObservation, ReasoningState
from .environment import ReasoningEnvironment

# A session holds one data set, most of which are a configuration and a list of words.
MAX_CONCURRENT_ENVS = 1024

app = create_app(
    ReasoningEnvironment,
    ReasoningAction,
    ReasoningObservation,
    env_name="reasoning",
    max_concurrent_envs=MAX_CONCURRENT_ENVS,
    state_cls=ReasoningState,
)
