"""The client of a server of the shop."""

from openenv_core.worlds import WorldClient

from .models import ShopObservation, ShopState


class ShopEnv(WorldClient):
    """Plays the shop behind a server; see `WorldClient`."""

    state_type = ShopState
    reset_type = ShopObservation
    # The folder goes by two names, envs.shop_env here and shop_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
