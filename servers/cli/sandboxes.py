"""`ropewalk sandboxes`: a service that runs images, and commands where that is wanted, for whoever has a token."""

import argparse
import os
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any

from openenv_core.cli import Command
from openenv_core.errors import installed_with
from servers.listening import listen, url_host
from servers.logs import LEVELS
from servers.settings import ServerSettings, count, seconds, token_lines


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sandboxes`."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=8900, help="port to listen on; 0 for any (%(default)s)")
    add(
        "--token-file",
        metavar="PATH",
        help="file of tokens, one a line, # for comments; or ROPEWALK_TOKENS. There must be one",
    )
    add("--allowed-host", action="append", metavar="NAME", help="name that callers may use in Host")
    add(
        "--image",
        action="append",
        metavar="PATTERN",
        help="image that may be run, as in 'my-env:*'; several times for several; all by default",
    )
    add(
        "--allow-commands",
        action="store_true",
        help="run commands without an image too, as this user and with no limits: whoever has a token can do "
        "whatever you can",
    )
    limits = parser.add_argument_group("limits")

    def bound(option: str, read: Callable[[str, str], Any], default: Any, metavar: str, text: str) -> None:
        limits.add_argument(option, type=partial(read, option), default=default, metavar=metavar, help=text)

    bound("--max-sandboxes", count, 16, "N", "at once (%(default)s)")
    bound("--max-sandboxes-per-token", count, None, "N", "of one token")
    limits.add_argument(
        "--max-memory",
        default="2g",
        metavar="SIZE",
        help='of one sandbox; one that asks for none gets it; "none" for no limit (%(default)s)',
    )
    bound("--max-lease", seconds, 3600.0, "SECONDS", "(%(default)g)")
    bound("--max-body", count, 1 << 20, "BYTES", "of a request (%(default)s)")
    bound("--drain", seconds, 15.0, "SECONDS", "that sandboxes get to end when told to stop (%(default)g)")
    add("--log-level", default="info", choices=LEVELS, help="(%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal says to stop.

    Raises:
        ConfigurationError: There is no token, or the address cannot be had.
    """
    settings = _settings(arguments, os.environ)
    with installed_with("server", "a server's packages", "fastapi", "starlette", "uvicorn", "websockets"):
        from servers.hosting import Assembled, host
        from servers.logs import configure_logging
        from servers.sandboxes.app import SandboxApp
    from openenv_core.providers.docker.options import size_of
    from servers.sandboxes.limits import SandboxLimits

    limits = SandboxLimits(
        max_sandboxes=arguments.max_sandboxes,
        max_sandboxes_per_token=arguments.max_sandboxes_per_token,
        max_lease_s=arguments.max_lease,
        max_memory_bytes=None
        if arguments.max_memory == "none"
        else size_of("--max-memory", arguments.max_memory),
        images=tuple(arguments.image or ()),
        allow_commands=arguments.allow_commands,
    )
    app = SandboxApp(settings, limits)
    configure_logging(arguments.log_level, settings.tokens)
    with listen(arguments.host, arguments.port) as listener:
        address, port = listener.getsockname()[:2]
        print(f"ropewalk: sandboxes on http://{url_host(address)}:{port}", flush=True)
        return host(Assembled(app, app.drain), [listener], drain_s=settings.drain_s)


def _settings(arguments: argparse.Namespace, environ: MutableMapping[str, str]) -> ServerSettings:
    settings = ServerSettings.from_environment(environ)
    # What a sandbox is started with must not bring the tokens along.
    environ.pop("ROPEWALK_TOKENS", None)
    environ.pop("ROPEWALK_TOKEN_FILE", None)
    tokens = settings.tokens
    if arguments.token_file is not None:
        tokens = token_lines("--token-file", arguments.token_file)
    return replace(
        settings,
        tokens=tokens,
        allowed_hosts=tuple(arguments.allowed_host or settings.allowed_hosts),
        max_body_bytes=arguments.max_body,
        drain_s=arguments.drain,
    )


COMMAND = Command(
    name="sandboxes",
    help="run container images for others, over HTTP",
    configure=configure,
    run=run,
    examples=(
        "ropewalk sandboxes --token-file tokens.txt",
        "ropewalk sandboxes --token-file tokens.txt --image 'blackjack-env:*' --max-sandboxes 8 --max-memory 1g",
        "ropewalk sandboxes --token-file tokens.txt --allow-commands",
    ),
)
