"""The ASGI app of the environment that PETTINGZOO_ENV names; `pettingzoo_app` returns one for any environment."""

import json
import os
from collections.abc import Mapping
from typing import Any

from openenv_core.errors import ConfigurationError
from servers import create_app
from servers.app import EnvironmentApp

from ..models import models_for
from .environment import pettingzoo_environment


def pettingzoo_app(env_id: str, **options: Any) -> EnvironmentApp:
    """Return the ASGI app that serves a PettingZoo environment.

    Args:
        env_id: Its id in PettingZoo's registry, or `module:id`; the module, which registers it, is imported first.
        options: Keyword arguments of `pettingzoo.make`.

    Raises:
        ConfigurationError: A space of the environment cannot be encoded as JSON.
        pettingzoo.env_registry.exceptions.PettingZooRegistryError: There is no such environment.
    """
    game = pettingzoo_environment(env_id, options)
    return create_app(game, *models_for(game.ACTION_SPACES, game.OBSERVATION_SPACES), env_name="pettingzoo")


def _app_from_environ(environ: Mapping[str, str]) -> EnvironmentApp:
    try:
        options = json.loads(environ.get("PETTINGZOO_OPTIONS", "{}"))
        if not isinstance(options, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise ConfigurationError(
            f"PETTINGZOO_OPTIONS is to be a JSON object of arguments: {error}"
        ) from error
    return pettingzoo_app(environ.get("PETTINGZOO_ENV", "classic/tictactoe-v3"), **options)


app = _app_from_environ(os.environ)
