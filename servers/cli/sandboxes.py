"""`ropewalk sandboxes`: serve E2B's API on this machine to clients with a token."""

import argparse
import os
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from openenv_core.cli import Command
from openenv_core.errors import installed_with
from openenv_core.providers.docker.options import size_of
from openenv_core.sandbox.config import Isolation
from servers.listening import listen, url_host
from servers.logs import LEVELS
from servers.settings import ServerSettings, count, seconds, token_lines

MAX_BODY: Final = 8 << 20
"""Bytes of a request's body, uploads excepted."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sandboxes`."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=8900, help="port to listen on; 0 for any (%(default)s)")
    add(
        "--token-file",
        metavar="PATH",
        help="file of tokens, one per line, # for comments; required unless ROPEWALK_TOKENS is set",
    )
    add("--allowed-host", action="append", metavar="NAME", help="name that clients may use in Host")
    add(
        "--image",
        action="append",
        metavar="PATTERN",
        help="image of the local engine that may be used as a template, such as 'my-env:*' (none); may be given "
        "several times",
    )
    add(
        "--minimum-isolation",
        default=Isolation.LSM,
        type=Isolation,
        choices=list(Isolation),
        help="weakest isolation level of process sandboxes (%(default)s); docs/sandbox.md describes the levels",
    )
    add(
        "--preload",
        default="",
        metavar="NAMES",
        help="modules to import before interpreters are forked, such as 'numpy,matplotlib'",
    )
    add(
        "--domain",
        metavar="NAME",
        help="domain whose PORT-SANDBOX.NAME leads to this service, for clients that address sandboxes by it",
    )
    limits = parser.add_argument_group("limits")

    def bound(option: str, read: Callable[[str, str], Any], default: Any, metavar: str, text: str) -> None:
        limits.add_argument(option, type=partial(read, option), default=default, metavar=metavar, help=text)

    bound("--max-sandboxes", count, 16, "N", "concurrent sandboxes (%(default)s)")
    bound("--max-sandboxes-per-token", count, None, "N", "concurrent sandboxes per token")
    bound("--warm", count, None, "N", "containers kept ready, of the images requested last (none)")
    bound("--max-timeout", seconds, 86_400.0, "SECONDS", "longest timeout of a sandbox (%(default)g)")
    bound(
        "--memory",
        size_of,
        "1g",
        "SIZE",
        "memory of a container, and of each program of a process sandbox (%(default)s)",
    )
    bound("--disk", size_of, "256m", "SIZE", "all files of a process sandbox (%(default)s)")
    bound("--pids", count, 256, "N", "processes and threads of one sandbox (%(default)s)")
    bound("--drain", seconds, 15.0, "SECONDS", "for sandboxes to end when the service stops (%(default)g)")
    add("--log-level", default="info", choices=LEVELS, help="level of log messages (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it; ConfigurationError if there is no token or the address is unavailable."""
    settings = _settings(arguments, os.environ)
    with installed_with("server", "a server's packages", "fastapi", "starlette", "uvicorn", "websockets"):
        from servers.hosting import Assembled, host
        from servers.logs import configure_logging
        from servers.sandboxes.app import SandboxApp
    from servers.sandboxes.table import SandboxLimits

    limits = SandboxLimits(
        max_sandboxes=arguments.max_sandboxes,
        max_sandboxes_per_key=arguments.max_sandboxes_per_token,
        max_timeout_s=arguments.max_timeout,
        memory_bytes=arguments.memory,
        disk_bytes=arguments.disk,
        pids=arguments.pids,
        images=tuple(arguments.image or ()),
        warm=arguments.warm or 0,
        minimum_isolation=arguments.minimum_isolation,
        preload=tuple(name for name in arguments.preload.split(",") if name),
    )
    app = SandboxApp(settings, limits, domain=arguments.domain)
    configure_logging(arguments.log_level, settings.tokens)
    with listen(arguments.host, arguments.port) as listener:
        address, port = listener.getsockname()[:2]
        print(f"ropewalk: sandboxes on http://{url_host(address)}:{port}", flush=True)
        return host(Assembled(app, app.drain), [listener], drain_s=settings.drain_s)


def _settings(arguments: argparse.Namespace, environ: MutableMapping[str, str]) -> ServerSettings:
    settings = ServerSettings.from_environment(environ)
    # Sandboxes must not inherit the tokens.
    environ.pop("ROPEWALK_TOKENS", None)
    environ.pop("ROPEWALK_TOKEN_FILE", None)
    names = () if arguments.domain is None else (arguments.domain, f"*.{arguments.domain}")
    tokens = settings.tokens
    if arguments.token_file is not None:
        tokens = token_lines("--token-file", arguments.token_file)
    return replace(
        settings,
        tokens=tokens,
        allowed_hosts=(*(arguments.allowed_host or settings.allowed_hosts), *names),
        max_body_bytes=MAX_BODY,
        drain_s=arguments.drain,
    )


COMMAND = Command(
    name="sandboxes",
    help="serve sandboxes over E2B's API",
    configure=configure,
    run=run,
    examples=(
        "ropewalk sandboxes --token-file tokens.txt",
        "ropewalk sandboxes --token-file tokens.txt --preload numpy,matplotlib --max-sandboxes 64",
        "ropewalk sandboxes --token-file tokens.txt --image 'blackjack-env:*' --image python:3.12-slim",
    ),
)
