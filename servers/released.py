"""The server's part of the released package's import paths, which `openenv_core.compat` installs."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fastapi import FastAPI

    from servers.app import EnvironmentApp

NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "openenv.core.env_server.http_server": {
        "create_app": "servers:create_app",
        "create_fastapi_app": "servers:create_fastapi_app",
        "HTTPEnvServer": "servers.released:HTTPEnvServer",
    },
    "openenv.core.env_server.web_interface": {
        "ActionLog": "servers.page.manager:ActionLog",
        "EpisodeState": "servers.page.manager:EpisodeState",
        "WebInterfaceManager": "servers.page.manager:WebInterfaceManager",
        "create_web_interface_app": "servers.released:create_web_interface_app",
    },
}


def create_web_interface_app(*args: Any, **options: Any) -> "EnvironmentApp":
    """Build a server as `create_app` does, with the same parameters, and with the page enabled."""
    from servers.app import AppSettings, EnvironmentApp, building_apps, create_app
    from servers.settings import ServerSettings

    def build_with_page(served: AppSettings, settings: ServerSettings) -> EnvironmentApp:
        assert served.page is not None
        return build(replace(served, page=replace(served.page, always=True)), settings)

    with building_apps(build_with_page) as build:
        return create_app(*args, **options)


class HTTPEnvServer:
    """An environment served within another application, with all the checks of `create_app`.

    It takes the parameters of `create_fastapi_app`.

    Raises:
        TypeError: The environment is an instance.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        from servers.app import create_fastapi_app

        self._create = partial(create_fastapi_app, *args, **options)
        self._create()  # raises now if the arguments are invalid

    def register_routes(self, app: "FastAPI", mode: Any = None) -> None:
        """Serve the environment on all paths for which the application has no route.

        Args:
            app: The application.
            mode: `production` serves no reset, step or state.

        Raises:
            ConfigurationError: The mode is unknown.
        """
        app.mount("/", self._create(mode=mode))
