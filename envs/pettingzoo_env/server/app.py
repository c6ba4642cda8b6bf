"""The ASGI app of the environment that PETTINGZOO_ENV names; `pettingzoo_app` returns one for any environment."""

import os
from typing import Any

from servers import create_app
from servers.app import EnvironmentApp
from servers.settings import json_object

from ..models import models_for
from .environment import pettingzoo_environment


def pettingzoo_app(env_id: str, api: str | None = None, **options: Any) -> EnvironmentApp:
    """Return the ASGI app that serves a PettingZoo environment.

    Args:
        env_id: Its id in PettingZoo's registry, or `module:id`; the module, which registers it, is imported first.
        api: "aec" or "parallel"; None: "aec" if the environment is registered as one.
        options: Keyword arguments of `pettingzoo.make`.

    Raises:
        ConfigurationError: A space of the environment cannot be encoded as JSON.
        pettingzoo.env_registry.exceptions.PettingZooRegistryError: There is no such environment.
    """
    game = pettingzoo_environment(env_id, options, api)
    return create_app(game, *models_for(game.ACTION_SPACES, game.OBSERVATION_SPACES), env_name="pettingzoo")


app = pettingzoo_app(
    os.environ.get("PETTINGZOO_ENV", "classic/tictactoe-v3"),
    os.environ.get("PETTINGZOO_API"),
    **json_object("PETTINGZOO_OPTIONS", os.environ.get("PETTINGZOO_OPTIONS", "{}")),
)
