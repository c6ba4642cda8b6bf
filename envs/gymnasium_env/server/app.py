"""The ASGI app of the environment that GYMNASIUM_ENV names; `gymnasium_app` returns one for any environment."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from openenv_core.errors import ConfigurationError
from servers import create_app
from servers.app import EnvironmentApp
from servers.settings import json_object

from ..models import GymnasiumState, models_for
from .environment import GymnasiumEnvironment, QuickGymnasiumEnvironment, Wrapper, is_quick

MAX_CONCURRENT_ENVS = 256


def gymnasium_app(
    env_id: str,
    wrappers: Sequence[Wrapper] = (),
    *,
    max_concurrent_envs: int = MAX_CONCURRENT_ENVS,
    **options: Any,
) -> EnvironmentApp:
    """Return the ASGI app that serves a Gymnasium environment.

    Args:
        env_id: The first argument of `gymnasium.make`: the id of a registered environment, or `module:id`.
        wrappers: Functions that wrap an environment; the first one is innermost.
        max_concurrent_envs: The maximum number of concurrent sessions.
        options: Keyword arguments of `gymnasium.make`, such as `render_mode="rgb_array"`.

    Raises:
        ConfigurationError: A space of the environment cannot be encoded as JSON.
        gymnasium.error.Error: There is no such environment.
    """
    probe = GymnasiumEnvironment(env_id, tuple(wrappers), options)
    try:
        action, observation = models_for(probe.inner.action_space, probe.inner.observation_space)
        uses_quick_class = not wrappers and is_quick(probe.inner)
    finally:
        probe.close()
    return create_app(
        partial(
            QuickGymnasiumEnvironment if uses_quick_class else GymnasiumEnvironment,
            env_id,
            tuple(wrappers),
            options,
            observation,
        ),
        action,
        observation,
        env_name="gymnasium",
        max_concurrent_envs=max_concurrent_envs,
        state_cls=GymnasiumState,
    )


def _app_from_environ(environ: Mapping[str, str]) -> EnvironmentApp:
    options = json_object("GYMNASIUM_OPTIONS", environ.get("GYMNASIUM_OPTIONS", "{}"))
    wrappers = [_load(path) for path in environ.get("GYMNASIUM_WRAPPERS", "").split(",") if path]
    return gymnasium_app(environ.get("GYMNASIUM_ENV", "CartPole-v1"), wrappers, **options)


def _load(path: str) -> Wrapper:
    module, _, name = path.strip().partition(":")
    try:
        wrapper: Wrapper = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"GYMNASIUM_WRAPPERS is to name wrappers as module:attribute, and {path!r} cannot be had: {error}"
        ) from error
    return wrapper


app = _app_from_environ(os.environ)
