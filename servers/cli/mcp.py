"""`ropewalk mcp`: serve an environment's tools to an MCP host over standard input and output."""

import argparse
import asyncio
import os
from dataclasses import replace
from functools import partial
from typing import Any, Final

from openenv_core.cli import Command
from openenv_core.errors import ConfigurationError, OpenEnvError, installed_with
from openenv_core.protocol.jsonio import from_json
from servers.logs import LEVELS
from servers.settings import ServerSettings, seconds_or_none

FAILED: Final = 2
ENDED: Final = 1

_LEFTOVER_GRACE_S: Final = 3.0
"""Seconds that threads left running by an environment get at exit."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mcp`."""
    add = parser.add_argument
    add(
        "app",
        metavar="NAME|PATH|MODULE:ATTRIBUTE",
        help="an environment by its name, its folder or file, or the app that create_app returned; actions of one "
        "without tools are offered as tools",
    )
    add("--seed", type=int, help="reset with this seed")
    add("--seat", help="the seat to play in a game of several players; the server's policies play the others")
    add(
        "--option",
        action="append",
        metavar="NAME=VALUE",
        help="reset with this option, parsed as JSON or else text; may be given several times",
    )
    add(
        "--step-timeout",
        type=partial(seconds_or_none, "--step-timeout"),
        default=argparse.SUPPRESS,
        metavar="SECONDS",
        help="limit of a call; 0 for none (300, or ROPEWALK_STEP_TIMEOUT)",
    )
    add(
        "--log-level",
        default="warning",
        choices=LEVELS,
        help="level of messages on standard error (%(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until the host closes its end.

    Raises:
        ConfigurationError: The environment does not exist, or the MCP SDK is missing.
    """
    options = _options(arguments)
    settings = ServerSettings.from_environment(os.environ)
    if "step_timeout" in arguments:
        settings = replace(settings, step_timeout_s=arguments.step_timeout)
    expected = "the packages of an MCP server"
    with (
        installed_with("mcp", expected, "mcp", "mcp_types", "anyio"),
        installed_with("server", expected, "fastapi", "starlette", "uvicorn"),
    ):
        from servers.mcp.stdio import take_standard_streams

        # Before any of the environment's code can print.
        wire = take_standard_streams(settings.max_body_bytes)
        return _serve(arguments, options, settings, wire)


def _serve(
    arguments: argparse.Namespace, options: dict[str, Any], settings: ServerSettings, wire: Any
) -> int:
    from openenv_core.tracebacks import show
    from servers.app import EnvironmentApp, building_apps
    from servers.hosting import ExitTimer
    from servers.logs import configure_logging
    from servers.mcp.stdio import serve_stdio
    from servers.target import load_app

    configure_logging(arguments.log_level)
    try:
        with building_apps(lambda served, _: EnvironmentApp(served, settings)):
            app = load_app(arguments.app)
        if not isinstance(app, EnvironmentApp):
            raise ConfigurationError(
                f"expected an app of create_app for MCP, got {type(app).__name__} at {arguments.app!r}"
            )
        served = asyncio.run(serve_stdio(app, app.title, options, wire))
    except (OpenEnvError, ModuleNotFoundError):
        raise
    except Exception as error:  # an error in the author's code, shown to the author
        show(error)
        return FAILED
    finally:
        ExitTimer().set_deadline(_LEFTOVER_GRACE_S)
    return 0 if served else ENDED


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for option in arguments.option or ():
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"expected --option NAME=VALUE, got {option!r}")
        try:
            options[name] = from_json(value)
        except ValueError:
            options[name] = value
    for name in ("seed", "seat"):
        if (given := getattr(arguments, name)) is not None:
            options[name] = given
    return options


COMMAND = Command(
    name="mcp",
    help="serve the tools of an environment to an MCP host, over standard input and output",
    configure=configure,
    run=run,
    examples=(
        "ropewalk mcp shop --seed 7",
        "ropewalk mcp ./my_env --option difficulty=hard",
        "ropewalk mcp kuhn --seat second",
        "",
        "in the mcpServers of a desktop host's settings:",
        '{"mcpServers": {"shop": {"command": "ropewalk", "args": ["mcp", "shop", "--seed", "7"]}}}',
    ),
)
