"""The ASGI app: `ropewalk serve shop`, or `uvicorn envs.shop_env.server.app:app`."""

from openenv_core.tools import ToolAction, ToolObservation
from servers import create_app

from ..models import ShopObservation, ShopState
from .environment import ShopEnvironment

# A session takes a few dozen kilobytes.
MAX_CONCURRENT_ENVS = 1024

app = create_app(
    ShopEnvironment,
    ToolAction,
    ToolObservation,
    env_name="shop",
    max_concurrent_envs=MAX_CONCURRENT_ENVS,
    state_cls=ShopState,
    reset_observation_cls=ShopObservation,
)
