"""`ropewalk serve`: an environment server with the best settings that the stack has."""

import argparse
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openenv_core.cli import Command
from openenv_core.errors import ConfigurationError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

DRAIN_S = 3
"""Seconds that open connections get when the server is asked to stop."""

SETTINGS: dict[str, Any] = {
    # The sans-I/O protocol takes about two thirds of the default one's CPU a message, and frames of a few
    # hundred bytes are not worth compressing.
    "ws": "websockets-sansio",
    "ws_per_message_deflate": False,
    "timeout_graceful_shutdown": DRAIN_S,
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    parser.add_argument("app", metavar="MODULE:ATTRIBUTE", help="the app, as create_app returns it")
    parser.add_argument("--host", default=DEFAULT_HOST, help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port to listen on; 0 for any (%(default)s)"
    )
    parser.add_argument("--fd", type=int, help="listen on this inherited socket instead")
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("critical", "error", "warning", "info", "debug"),
        help="(%(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal says to stop.

    Raises:
        ConfigurationError: The app cannot be imported, or the address cannot be had.
    """
    app = _load(arguments.app)
    import uvicorn

    listener = _listener(arguments)
    with listener:
        config = uvicorn.Config(
            app,
            log_level=arguments.log_level,
            access_log=False,
            **SETTINGS,
        )
        if arguments.fd is None:
            host, port = listener.getsockname()[:2]
            print(
                f"ropewalk: serving {arguments.app} on http://{f'[{host}]' if ':' in host else host}:{port}"
            )
            sys.stdout.flush()
        server = uvicorn.Server(config)
        server.run(sockets=[listener])
    return 0 if server.started else 1


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
    if not callable(app):
        raise ConfigurationError(
            f"expected an ASGI app at {name!r}, as create_app returns it, got {type(app).__name__}"
        )
    return app  # type: ignore[no-any-return]


def _listener(arguments: argparse.Namespace) -> socket.socket:
    if arguments.fd is not None:
        try:
            return socket.socket(fileno=arguments.fd)
        except OSError as error:
            raise ConfigurationError(
                f"expected --fd to be an open socket, got {arguments.fd}: {error}"
            ) from error
    family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
    try:
        return socket.create_server((arguments.host, arguments.port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"expected to listen on {arguments.host}:{arguments.port}, got: {error}; choose another --port"
        ) from error


COMMAND = Command(
    name="serve",
    help="serve an environment over WebSocket and HTTP",
    configure=configure,
    run=run,
    examples=(
        "ropewalk serve envs.blackjack_env.server.app:app",
        "ropewalk serve envs.blackjack_env.server.app:app --host 127.0.0.1 --port 8000",
    ),
)
