"""`ropewalk serve`: an environment server with the best settings that the stack has."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openenv_core.cli import Command
from openenv_core.errors import ConfigurationError
from servers.cli.options import OF_SESSIONS, add_options, given, insecure, take_settings
from servers.listening import inherited, listen, refuse_strangers_without_token, url_host


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    parser.add_argument("app", metavar="MODULE:ATTRIBUTE", help="the app, as create_app returns it")
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal says to stop.

    Raises:
        ConfigurationError: The app cannot be imported, the address cannot be had, or strangers could come in.
    """
    settings = take_settings(arguments, os.environ)
    listener = inherited(arguments.fd) if arguments.fd is not None else listen(arguments.host, arguments.port)
    with listener:
        refuse_strangers_without_token(listener, settings, insecure=insecure(arguments))
        app = _load(arguments.app)
        from servers.assembly import assemble
        from servers.hosting import host
        from servers.logs import configure_logging

        configure_logging(arguments.log_level, settings.tokens)
        options = [option for name, option in OF_SESSIONS.items() if given(arguments, name)]
        served = assemble(app, arguments.app, settings, options)
        if arguments.fd is None:
            name, port = listener.getsockname()[:2]
            print(f"ropewalk: serving {arguments.app} on http://{url_host(name)}:{port}", flush=True)
        return host(served.app, [listener], drain=served.drain, drain_s=settings.drain_s)


def _load(name: str) -> Callable[..., Any]:
    """Import the app. An exception of its own, which is for its author to read, passes with its traceback."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        from uvicorn.importer import ImportFromStringError, import_from_string
    except ImportError as error:
        raise ConfigurationError(f"expected uvicorn, got: {error}; pip install 'ropewalk[server]'") from error
    try:
        app = import_from_string(name)
    except ImportFromStringError as error:
        raise ConfigurationError(
            f"expected an app at {name!r}, got: {error} "
            "Give module:attribute, importable from here or installed"
        ) from error
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"expected to import the app {name!r}, got: {error}; install what it needs "
            "(ropewalk[gymnasium], for one, serves BlackJack)"
        ) from error
    return app  # type: ignore[no-any-return]


COMMAND = Command(
    name="serve",
    help="serve an environment over WebSocket and HTTP",
    configure=configure,
    run=run,
    examples=(
        "ropewalk serve envs.blackjack_env.server.app:app",
        "ropewalk serve envs.blackjack_env.server.app:app --port 8000 --workers 2",
        "ropewalk serve envs.blackjack_env.server.app:app --host 0.0.0.0 --token-file tokens.txt",
    ),
)
