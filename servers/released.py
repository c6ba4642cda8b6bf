"""What the released package's modules of the server's side hold here; `openenv_core.compat` asks for it."""

from typing import TYPE_CHECKING, Any, Final

from openenv_core.compat import Extra
from openenv_core.types import ConcurrencyConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

    from servers.execution import Factory

NAMES: Final[Extra] = {
    "openenv.core.env_server.http_server": {
        "create_app": "servers:create_app",
        "create_fastapi_app": "servers:create_fastapi_app",
        "HTTPEnvServer": "servers.released:HTTPEnvServer",
    }
}


class HTTPEnvServer:
    """An environment that is served below somebody's own application, with all that `create_app` checks.

    Args:
        env: The environment class, or a callable without arguments that returns an environment.
        action_cls: The action model.
        observation_cls: The observation model.
        max_concurrent_envs: The greatest number of sessions at once; 1 by default.
        concurrency_config: The same, with a time for sessions that nobody uses.

    Raises:
        TypeError: `env` is an instance.
    """

    def __init__(
        self,
        env: "Factory",
        action_cls: Any,
        observation_cls: Any,
        max_concurrent_envs: int | None = None,
        concurrency_config: ConcurrencyConfig | None = None,
    ) -> None:
        from servers.app import create_app

        self._given = (env, action_cls, observation_cls)
        self._cap: dict[str, Any] = {
            "max_concurrent_envs": max_concurrent_envs,
            "concurrency_config": concurrency_config,
        }
        create_app(*self._given, **self._cap)  # what is wrong with it is told here

    def register_routes(self, app: "FastAPI", mode: Any = None) -> None:
        """Serve the environment's routes for all that the application has none for.

        Args:
            app: Where to.
            mode: `production` serves no reset, step or state.

        Raises:
            ConfigurationError: There is no such mode.
        """
        from servers.app import create_app

        app.mount("/", create_app(*self._given, **self._cap, mode=mode))
