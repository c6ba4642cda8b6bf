"""The ASGI app: `ropewalk serve shop`, or `uvicorn envs.shop_env.server.app:app`."""

from servers import create_app

from ..models import ShopObservation
from .environment import ShopEnvironment

app = create_app(ShopEnvironment, env_name="shop", reset_observation_cls=ShopObservation)
