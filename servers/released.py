"""What the released package's modules of the server's side hold here; `openenv_core.compat` asks for it."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from openenv_core.compat import Extra
from openenv_core.types import ConcurrencyConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

    from servers.app import EnvironmentApp
    from servers.execution import Factory

NAMES: Final[Extra] = {
    "openenv.core.env_server.http_server": {
        "create_app": "servers:create_app",
        "create_fastapi_app": "servers:create_fastapi_app",
        "HTTPEnvServer": "servers.released:HTTPEnvServer",
    },
    "openenv.core.env_server.web_interface": {
        "WebInterfaceManager": "servers.page.manager:WebInterfaceManager",
        "create_web_interface_app": "servers.released:create_web_interface_app",
    },
}


def create_web_interface_app(*args: Any, **options: Any) -> "EnvironmentApp":
    """Build the same server as `create_app`, of which it takes the parameters, with the page on."""
    from servers.app import EnvironmentApp, create_app

    app = create_app(*args, **options)
    assert app.served.page is not None
    served = replace(app.served, page=replace(app.served.page, always=True))
    return EnvironmentApp(served, app.settings)


class HTTPEnvServer:
    """An environment that is served below somebody's own application, with all that `create_app` checks.

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
        from servers.app import create_fastapi_app

        app.mount("/", create_fastapi_app(*self._given, **self._cap, mode=mode))
