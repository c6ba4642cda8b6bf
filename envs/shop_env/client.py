"""The client of the shop environment."""

from openenv_core.worlds import WorldClient

from .models import ShopObservation, ShopState


class ShopEnv(WorldClient):
    """A session on a server of the shop environment; see `WorldClient`."""

    state_type = ShopState
    reset_type = ShopObservation
    # The package is named envs.shop_env in this repository and shop_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
