"""What a server process serves: an application of ours with its settings, or a foreign one behind the guard."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from openenv_core.errors import ConfigurationError
from servers.app import EnvironmentApp
from servers.hosting import Drain
from servers.security import Guard
from servers.settings import ServerSettings


class Served(NamedTuple):
    """An ASGI application, and what ends its sessions, if it has some."""

    app: Any
    drain: Drain | None


def assemble(app: object, name: str, settings: ServerSettings, options: Sequence[str]) -> Served:
    """Apply the settings.

    Args:
        app: What was loaded.
        name: What it was asked for by.
        settings: The settings.
        options: Options that were given and that only an application of ours can heed.

    Raises:
        ConfigurationError: It is no ASGI application, or a foreign one that cannot heed the options.
    """
    if isinstance(app, EnvironmentApp):
        if not hasattr(app, "drain"):
            return Served(Guard(app, settings), None)
        app.configure(settings)
        return Served(app, app.drain)
    if not _is_asgi(app):
        raise ConfigurationError(
            f"expected an ASGI app at {name!r}, as create_app returns it, got {type(app).__name__}"
        )
    if options:
        raise ConfigurationError(
            f"expected an app of create_app for {', '.join(options)}, got {type(app).__name__} at {name!r}; "
            "leave the options out, or build the app with create_app"
        )
    return Served(Guard(app, settings), None)  # type: ignore[arg-type]


def _is_asgi(app: object) -> bool:
    if inspect.isclass(app) or not callable(app):
        return False
    if not (inspect.iscoroutinefunction(app) or inspect.iscoroutinefunction(type(app).__call__)):
        return False
    try:
        inspect.signature(app).bind({}, None, None)
    except (TypeError, ValueError):
        return False
    return True
