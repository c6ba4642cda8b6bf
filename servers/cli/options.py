"""The options of `ropewalk serve`, and the settings that come of them: defaults, then environment, then options."""

import argparse
import os
from collections.abc import MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from servers.logs import LEVELS
from servers.settings import MODES, ServerSettings, count, seconds, seconds_or_none, token_lines

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000

OF_SESSIONS: Final = {
    "max_sessions": "--max-sessions",
    "max_sessions_per_token": "--max-sessions-per-token",
    "step_timeout_s": "--step-timeout",
    "idle_timeout_s": "--idle-timeout",
    "mode": "--mode",
}
"""Settings that only an application of create_app can heed, and their options."""

_OTHERS: Final = ("max_body_bytes", "drain_s")
_NOT_GIVEN: Final = object()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add everything but the application's name."""
    add = parser.add_argument
    add("--host", default=DEFAULT_HOST, help="address to listen on (%(default)s)")
    add("--port", type=int, default=DEFAULT_PORT, help="port to listen on; 0 for any (%(default)s)")
    add("--fd", type=int, help="listen on this inherited socket instead")
    add(
        "--workers", type=partial(count, "--workers"), default=1, help="processes to serve from (%(default)s)"
    )
    add(
        "--reload",
        action="store_true",
        help="start anew whenever the environment's source changes; for its author, with one worker",
    )
    add(
        "--reload-dir",
        action="append",
        metavar="PATH",
        help="watch this folder too, with --reload; several times for several",
    )

    access = parser.add_argument_group("who may come in")
    access.add_argument(
        "--token",
        action="append",
        metavar="TOKEN",
        help="bearer token that callers must have; several times for several. Other users of this machine can "
        "read it in the list of processes: prefer --token-file or ROPEWALK_TOKENS",
    )
    access.add_argument("--token-file", metavar="PATH", help="file of tokens, one a line, # for comments")
    access.add_argument(
        "--insecure", action="store_true", help="listen beyond loopback without a token (ROPEWALK_INSECURE=1)"
    )
    access.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="name that callers may use in Host, beside addresses and localhost; *.NAME, or * for any",
    )
    access.add_argument(
        "--allowed-origin",
        action="append",
        metavar="ORIGIN",
        help="origin of pages that may use this server, as in https://example.org; * for any",
    )

    limits = parser.add_argument_group("limits")
    _setting(limits, "--max-sessions", "max_sessions", count, "N", "sessions at once, over all workers")
    _setting(limits, "--max-sessions-per-token", "max_sessions_per_token", count, "N", "of one token")
    _setting(
        limits,
        "--step-timeout",
        "step_timeout_s",
        seconds_or_none,
        "SECONDS",
        "for a reset, step, state or constructor; 0 for no bound (300)",
    )
    _setting(
        limits,
        "--idle-timeout",
        "idle_timeout_s",
        seconds,
        "SECONDS",
        "after which a session without a socket ends (900)",
    )
    _setting(limits, "--max-body", "max_body_bytes", count, "BYTES", "of an HTTP request (16777216)")
    _setting(limits, "--drain", "drain_s", seconds, "SECONDS", "that sessions get when told to stop (8)")

    limits.add_argument(
        "--mode",
        choices=MODES,
        default=_NOT_GIVEN,
        help="production serves tools only: no reset, step or state (OPENENV_MODE, simulation)",
    )
    add("--log-level", default="info", choices=LEVELS, help="(%(default)s)")


def _setting(group: Any, option: str, name: str, read: Any, metavar: str, text: str) -> None:
    group.add_argument(
        option, dest=name, type=partial(read, option), default=_NOT_GIVEN, metavar=metavar, help=text
    )


def is_given(arguments: argparse.Namespace, name: str) -> bool:
    """Say whether the option of a setting stands on the command line."""
    return getattr(arguments, name) is not _NOT_GIVEN


def take_settings(arguments: argparse.Namespace, environ: MutableMapping[str, str]) -> ServerSettings:
    """Return the settings, and take the tokens out of the environment.

    What an environment's code starts, or prints of its surroundings, should not have them.

    Raises:
        ConfigurationError: A value cannot be used.
    """
    settings = ServerSettings.from_environment(environ)
    environ.pop("ROPEWALK_TOKENS", None)
    changes: dict[str, Any] = {
        name: getattr(arguments, name) for name in (*OF_SESSIONS, *_OTHERS) if is_given(arguments, name)
    }
    tokens = tuple(arguments.token or ())
    if arguments.token_file is not None:
        tokens += token_lines("--token-file", arguments.token_file)
    if arguments.token or arguments.token_file is not None:
        changes["tokens"] = tokens
    if arguments.allowed_host:
        changes["allowed_hosts"] = tuple(arguments.allowed_host)
    if arguments.allowed_origin:
        changes["allowed_origins"] = tuple(arguments.allowed_origin)
    return replace(settings, **changes)


def insecure(arguments: argparse.Namespace) -> bool:
    """Say whether a server without tokens may listen beyond loopback."""
    said = os.environ.get("ROPEWALK_INSECURE", "").strip().lower()
    return bool(arguments.insecure) or said in ("1", "true", "yes")
