"""`ropewalk serve`: serve an environment, in one or several processes, or reloading with its source."""

import argparse
import gc
import os
from argparse import SUPPRESS
from collections.abc import MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any, Final

from openenv_core.cli import Command
from openenv_core.errors import ConfigurationError, OpenEnvError, installed_with
from openenv_core.garbage import GC_THRESHOLD
from openenv_core.one_file import name_class
from openenv_core.targets import variables_for
from servers.listening import (
    inherit_socket,
    is_exposed,
    listen,
    open_listeners,
    require_token_if_exposed,
    url_host,
)
from servers.logs import LEVELS
from servers.settings import (
    MODES,
    ServePlan,
    ServerSettings,
    count,
    is_on,
    seconds,
    seconds_or_none,
    token_lines,
)

_FAILED: Final = 2

_RELOAD_DRAIN_S: Final = 1.0
"""Drain of sessions before a reload, unless --drain is given: short, since the author waits for it."""


_STEP_TIMEOUT_HELP: Final = "limit of a reset, step, state, tool call or constructor; 0 for none (300)"
_LIMITS: Final = (
    ("--max-sessions", "max_sessions", count, "N", "concurrent sessions over all workers"),
    ("--max-sessions-per-token", "max_sessions_per_token", count, "N", "concurrent sessions per token"),
    ("--max-waiting", "max_waiting", count, "N", "clients that may wait for a session (4096)"),
    ("--max-wait", "max_wait_s", seconds, "SECONDS", "longest wait of a client; 0: refuse at once (3600)"),
    ("--step-timeout", "step_timeout_s", seconds_or_none, "SECONDS", _STEP_TIMEOUT_HELP),
    ("--idle-timeout", "idle_timeout_s", seconds, "SECONDS", "until a session without a socket ends (900)"),
    ("--max-body", "max_body_bytes", count, "BYTES", "size of an HTTP request (16777216)"),
    ("--drain", "drain_s", seconds, "SECONDS", "for sessions to end when the server stops (8)"),
)
"""Each option with its setting, its parser, its metavar and its help."""

_SERVER_SETTINGS: Final = ("max_body_bytes", "drain_s", "allowed_hosts", "allowed_origins")
_SESSION_OPTIONS: Final = {
    **{name: option for option, name, *_ in _LIMITS if name not in _SERVER_SETTINGS},
    "mode": "--mode",
    "web": "--web",
    "mcp_single_session": "--mcp-single-session",
}
"""Settings that need an application of create_app, and their options. Options that are not given have no value."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    parser.add_argument(
        "app",
        metavar="NAME|PATH|MODULE:ATTRIBUTE",
        help="an environment by its name, its folder or file (FILE.py, or FILE.py:CLASS of several), or the app that "
        "create_app returned",
    )
    parser.add_argument(
        "argument",
        nargs="?",
        help="the environment's argument, such as a folder of Harbor tasks or a Gymnasium id; sets the first of the "
        "variables that its openenv.yaml lists",
    )
    _add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it.

    Raises:
        ConfigurationError: The app cannot be imported, the address is unavailable, or it is exposed without a token.
    """
    _check_reload_options(arguments)
    arguments.app = name_class(arguments.app)
    if arguments.argument is not None:
        os.environ.update(variables_for(arguments.app, arguments.argument))
    settings = _read_settings(arguments, os.environ)
    with ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in _listeners(arguments)]
        insecure = arguments.insecure or is_on(
            "ROPEWALK_INSECURE", os.environ.get("ROPEWALK_INSECURE", "").strip()
        )
        require_token_if_exposed(listeners[0], settings, insecure=insecure)
        settings = replace(settings, exposed=is_exposed(listeners[0]))
        _check_single_session(arguments, settings)
        if arguments.reload:
            return _run_reloading(arguments, settings, listeners[0])
        with installed_with("server", "a server's packages", "fastapi", "starlette", "uvicorn"):
            if arguments.workers > 1:
                return _run_fleet(arguments, settings, listeners)
            return _run_in_process(arguments, settings, listeners[0])


def _listeners(arguments: argparse.Namespace) -> list[socket]:
    if arguments.fd is not None:
        return [inherit_socket(arguments.fd)]
    if arguments.workers > 1:
        return open_listeners(arguments.host, arguments.port, arguments.workers)
    return [listen(arguments.host, arguments.port)]


def _run_in_process(arguments: argparse.Namespace, settings: ServerSettings, listener: socket) -> int:
    from openenv_core.tracebacks import show

    gc.set_threshold(GC_THRESHOLD)  # imports make little garbage, and frequent collections delay the start
    from servers.hosting import assemble, host
    from servers.logs import configure_logging

    gc.freeze()  # what is loaded so far stays: the collection before serving has only the app's objects to look at
    try:
        assembled = assemble(arguments.app, settings, _find_session_options(arguments))
    except (OpenEnvError, ModuleNotFoundError):
        raise
    except Exception as error:  # an error in the author's code, shown to the author
        show(error)
        return _FAILED
    configure_logging(arguments.log_level, settings.tokens)
    announce = partial(_announce, arguments, listener)  # not before an application that may refuse to start
    return host(assembled, [listener], drain_s=settings.drain_s, on_started=announce)


def _run_fleet(arguments: argparse.Namespace, settings: ServerSettings, listeners: list[socket]) -> int:
    import asyncio

    from servers.fleet.supervisor import Supervisor
    from servers.fleet.worker import WorkerPlan
    from servers.logs import configure_logging

    configure_logging(arguments.log_level, settings.tokens)
    plan = WorkerPlan(**_plan_options(arguments, settings), workers=arguments.workers, supervisor=os.getpid())
    announce = partial(_announce, arguments, listeners[0])
    return asyncio.run(Supervisor(plan, listeners, announce).run())


def _run_reloading(arguments: argparse.Namespace, settings: ServerSettings, listener: socket) -> int:
    from servers.environments import source_of
    from servers.reload import Reloader, watcher

    watcher()
    folders = [source_of(arguments.app), *(Path(path).resolve() for path in arguments.reload_dir or ())]
    if unknown := [str(folder) for folder in folders if not folder.is_dir()]:
        raise ConfigurationError(f"expected --reload-dir to name a folder, got {unknown[0]}")
    if "drain_s" not in arguments and settings.drain_s == ServerSettings().drain_s:
        settings = replace(settings, drain_s=_RELOAD_DRAIN_S)
    plan = ServePlan(**_plan_options(arguments, settings))
    _announce(arguments, listener)
    print(f"ropewalk: watching {', '.join(map(str, folders))}", flush=True)
    return Reloader(plan, listener, folders, partial(print, flush=True)).run()


def _check_reload_options(arguments: argparse.Namespace) -> None:
    if arguments.reload_dir and not arguments.reload:
        raise ConfigurationError("--reload-dir is given without --reload; give both, or neither")
    for option, is_there in (("--workers", arguments.workers > 1), ("--fd", arguments.fd is not None)):
        if arguments.reload and is_there:
            raise ConfigurationError(
                f"expected --reload without {option}, got both; --reload runs one process on a socket of its own, "
                f"for an author at work: leave out {option}, or --reload"
            )


def _check_single_session(arguments: argparse.Namespace, settings: ServerSettings) -> None:
    if settings.mcp_single_session and (settings.exposed or arguments.workers > 1):
        raise ConfigurationError(
            "expected --mcp-single-session on loopback with one worker, got "
            + ("an address that other machines reach" if settings.exposed else f"{arguments.workers} workers")
            + ": strangers would share an episode; without it a client uses /mcp/SESSION_ID of a session of its own"
        )


def _plan_options(arguments: argparse.Namespace, settings: ServerSettings) -> dict[str, Any]:
    return {
        "app": arguments.app,
        "options": _find_session_options(arguments),
        "log_level": arguments.log_level,
        "settings": settings,
    }


def _find_session_options(arguments: argparse.Namespace) -> tuple[str, ...]:
    return tuple(option for name, option in _SESSION_OPTIONS.items() if name in arguments)


def _announce(arguments: argparse.Namespace, listener: socket) -> None:
    if arguments.fd is None:
        host, port = listener.getsockname()[:2]
        print(f"ropewalk: serving {arguments.app} on http://{url_host(host)}:{port}", flush=True)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=8000, help="port to listen on; 0 for any (%(default)s)")
    add("--fd", type=int, help="listen on this inherited socket instead")
    add("--workers", type=partial(count, "--workers"), default=1, help="number of processes (%(default)s)")
    add(
        "--reload",
        action="store_true",
        help="restart when the environment's source changes; for development, with one worker",
    )
    add(
        "--reload-dir",
        action="append",
        metavar="PATH",
        help="watch this folder too, with --reload; may be given several times",
    )

    access = parser.add_argument_group("access")
    access.add_argument(
        "--token",
        action="append",
        metavar="TOKEN",
        help="bearer token that clients must send; may be given several times. Other users of this machine can "
        "read it in the list of processes: prefer --token-file or ROPEWALK_TOKENS",
    )
    access.add_argument("--token-file", metavar="PATH", help="file of tokens, one per line, # for comments")
    access.add_argument(
        "--insecure", action="store_true", help="listen beyond loopback without a token (ROPEWALK_INSECURE=1)"
    )
    access.add_argument(
        "--allowed-host",
        action="append",
        dest="allowed_hosts",
        default=SUPPRESS,
        metavar="NAME",
        help="name that clients may use in Host, besides addresses and localhost; *.NAME, or * for any",
    )
    access.add_argument(
        "--allowed-origin",
        action="append",
        dest="allowed_origins",
        default=SUPPRESS,
        metavar="ORIGIN",
        help="origin of pages that may use this server, such as https://example.org; * for any",
    )

    limits = parser.add_argument_group("limits", argument_default=SUPPRESS)
    for option, name, read, metavar, text in _LIMITS:
        limits.add_argument(option, dest=name, type=partial(read, option), metavar=metavar, help=text)
    text = "production serves tools only: no reset, step or state (OPENENV_MODE, simulation)"
    limits.add_argument("--mode", choices=MODES, help=text)
    text = "serve a page to play on, at /web (OPENENV_WEB=1)"
    add("--web", action="store_true", default=SUPPRESS, help=text)
    add(
        "--mcp-single-session",
        action="store_true",
        default=SUPPRESS,
        help="one session for all MCP clients at /mcp, for those that neither name one nor begin with initialize; "
        "on loopback only",
    )
    add("--log-level", default="info", choices=LEVELS, help="level of log messages (%(default)s)")


def _read_settings(arguments: argparse.Namespace, environ: MutableMapping[str, str]) -> ServerSettings:
    """Return the settings, and remove the tokens from `environ`.

    Processes that the environment starts must not inherit them, nor its code print them.
    """
    settings = ServerSettings.from_environment(environ)
    environ.pop("ROPEWALK_TOKENS", None)
    names = [name for name in (*_SESSION_OPTIONS, *_SERVER_SETTINGS) if name in arguments]
    given = {name: getattr(arguments, name) for name in names}
    changes: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    tokens = tuple(arguments.token or ())
    if arguments.token_file is not None:
        tokens += token_lines("--token-file", arguments.token_file)
    return replace(settings, **changes, tokens=tokens or settings.tokens)


COMMAND = Command(
    name="serve",
    help="serve an environment over WebSocket and HTTP",
    configure=configure,
    run=run,
    examples=(
        "ropewalk serve dice.py",
        "ropewalk serve blackjack",
        "ropewalk serve blackjack --web",
        "ropewalk serve . --reload",
        "ropewalk serve harbor tasks/",
        "ropewalk serve . --port 8000 --workers 2",
        "ropewalk serve envs.blackjack_env.server.app:app --host 0.0.0.0 --token-file tokens.txt",
    ),
)
