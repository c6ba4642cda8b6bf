"""Importing an author's application in this process.

The server's packages know how; this package knows nobody above it, so it goes through an entry point.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Final, Protocol, cast

from openenv_core.errors import ConfigurationError, installed_with

GROUP: Final = "ropewalk.apps"


class Described(Protocol):
    """What an application of `create_app` says of what it serves.

    Attributes:
        factory: The environment class, or a callable without arguments that returns an environment.
        action: The action model, or a union of models.
        models: The models under the keys of /schema: action, observation, state, reset_observation.
        name: What the environment is called; None: as its class.
        cap: The greatest number of sessions.
    """

    factory: Callable[[], Any]
    action: Any
    models: dict[str, Any]
    name: str | None
    cap: int


def load_app(target: str) -> Described:
    """Import the application that a target stands for, and return what it serves.

    Args:
        target: `module:attribute`, a path, or an environment's name.

    Raises:
        ConfigurationError: The server's packages are absent, there is no such thing, or it is an application that
            `create_app` did not make and that can be served but not looked into.
        Exception: Whatever the author's own code raised while it was imported.
    """
    point = next(iter(entry_points(group=GROUP)), None)
    if point is None:
        raise ConfigurationError(
            f"expected an installed package that offers the entry point {GROUP}, got none; "
            "pip install 'ropewalk[server]'"
        )
    with installed_with("server", "the server's packages"):
        load = point.load()
    app = load(target)
    if not hasattr(app, "served"):
        raise ConfigurationError(
            f"expected {target!r} to be made by create_app, got {type(app).__name__}, which can be served "
            "but not looked into; return what create_app returns"
        )
    return cast(Described, app.served)
