"""`ropewalk serve`: an environment server with the best settings that the stack has."""

import argparse
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import Final

from openenv_core.cli import Command
from openenv_core.errors import ConfigurationError, OpenEnvError
from servers.cli.options import OF_SESSIONS, add_options, insecure, is_given, take_settings
from servers.listening import (
    inherited,
    is_exposed,
    listen,
    listen_often,
    refuse_strangers_without_token,
    url_host,
)
from servers.settings import ServerSettings

FAILED: Final = 2

RELOAD_DRAIN_S: Final = 1.0
"""What sessions get when the source has changed, unless --drain says otherwise: its author waits for it."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    parser.add_argument(
        "app",
        metavar="NAME|PATH|MODULE:ATTRIBUTE",
        help="an environment by its name, its folder or file, or the app that create_app returned",
    )
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal says to stop.

    Raises:
        ConfigurationError: The app cannot be imported, the address cannot be had, or strangers could come in.
    """
    _refuse_what_reload_cannot(arguments)
    settings = take_settings(arguments, os.environ)
    with ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in _listeners(arguments)]
        refuse_strangers_without_token(listeners[0], settings, insecure=insecure(arguments))
        settings = replace(settings, exposed=is_exposed(listeners[0]))
        if arguments.reload:
            return _run_reloading(arguments, settings, listeners[0])
        try:
            if arguments.workers > 1:
                return _run_fleet(arguments, settings, listeners)
            return _run_here(arguments, settings, listeners[0])
        except ModuleNotFoundError as error:
            if error.name not in ("fastapi", "starlette", "uvicorn"):
                raise
            raise ConfigurationError(
                f"expected a server's packages, got: {error}; pip install 'ropewalk[server]'"
            ) from error


def _listeners(arguments: argparse.Namespace) -> list[socket]:
    if arguments.fd is not None:
        return [inherited(arguments.fd)]
    if arguments.workers > 1:
        return listen_often(arguments.host, arguments.port, arguments.workers)
    return [listen(arguments.host, arguments.port)]


def _run_here(arguments: argparse.Namespace, settings: ServerSettings, listener: socket) -> int:
    from openenv_core.tracebacks import show
    from servers.target import load_app

    try:
        app = load_app(arguments.app)
    except (OpenEnvError, ModuleNotFoundError):
        raise
    except Exception as error:  # the author's, who reads it
        show(error)
        return FAILED
    from servers.assembly import assemble
    from servers.hosting import host
    from servers.logs import configure_logging

    configure_logging(arguments.log_level, settings.tokens)
    assembled = assemble(app, arguments.app, settings, _options_of_sessions(arguments))
    _announce(arguments, listener)
    return host(assembled, [listener], drain_s=settings.drain_s)


def _run_fleet(arguments: argparse.Namespace, settings: ServerSettings, listeners: list[socket]) -> int:
    import asyncio

    from servers.fleet.plan import WorkerPlan
    from servers.fleet.supervisor import Supervisor
    from servers.logs import configure_logging

    configure_logging(arguments.log_level, settings.tokens)
    _announce(arguments, listeners[0])
    plan = WorkerPlan(
        app=arguments.app,
        index=0,
        workers=arguments.workers,
        listener=-1,
        slots=-1,
        ready=-1,
        supervisor=os.getpid(),
        folder="",
        options=_options_of_sessions(arguments),
        log_level=arguments.log_level,
        settings=settings,
    )
    return asyncio.run(Supervisor(plan, listeners).run())


def _run_reloading(arguments: argparse.Namespace, settings: ServerSettings, listener: socket) -> int:
    from servers.environments import source_of
    from servers.reload.plan import ReloadPlan
    from servers.reload.supervisor import Reloader, watcher

    watcher()
    folders = [source_of(arguments.app), *(_folder(path) for path in arguments.reload_dir or ())]
    if not is_given(arguments, "drain_s") and settings.drain_s == ServerSettings().drain_s:
        settings = replace(settings, drain_s=RELOAD_DRAIN_S)
    plan = ReloadPlan(
        app=arguments.app,
        options=_options_of_sessions(arguments),
        log_level=arguments.log_level,
        settings=settings,
        listener=-1,
    )
    _announce(arguments, listener)
    print(f"ropewalk: watching {', '.join(map(str, folders))}", flush=True)
    return Reloader(plan, listener, folders, partial(print, flush=True)).run()


def _folder(path: str) -> Path:
    found = Path(path).resolve()
    if not found.is_dir():
        raise ConfigurationError(f"expected --reload-dir to name a folder, got {path}")
    return found


def _refuse_what_reload_cannot(arguments: argparse.Namespace) -> None:
    if not arguments.reload:
        if arguments.reload_dir:
            raise ConfigurationError("expected --reload with --reload-dir, got none; give both, or neither")
        return
    for option, is_there in (("--workers", arguments.workers > 1), ("--fd", arguments.fd is not None)):
        if is_there:
            raise ConfigurationError(
                f"expected --reload without {option}, got both; --reload runs one process on a socket of its own, "
                f"for an author at work: leave out {option}, or --reload"
            )


def _options_of_sessions(arguments: argparse.Namespace) -> tuple[str, ...]:
    return tuple(option for name, option in OF_SESSIONS.items() if is_given(arguments, name))


def _announce(arguments: argparse.Namespace, listener: socket) -> None:
    if arguments.fd is None:
        host, port = listener.getsockname()[:2]
        print(f"ropewalk: serving {arguments.app} on http://{url_host(host)}:{port}", flush=True)


COMMAND = Command(
    name="serve",
    help="serve an environment over WebSocket and HTTP",
    configure=configure,
    run=run,
    examples=(
        "ropewalk serve blackjack",
        "ropewalk serve . --reload",
        "ropewalk serve . --port 8000 --workers 2",
        "ropewalk serve envs.blackjack_env.server.app:app --host 0.0.0.0 --token-file tokens.txt",
    ),
)
