"""`ropewalk validate`: runs the checks on an environment."""

import argparse
import io
import os
import sys
from importlib.util import find_spec
from typing import Final

from openenv_core.checker.check import CheckLevel, select_checks
from openenv_core.cli.command import Command, add_fields, read_fields
from openenv_core.errors import ConfigurationError
from openenv_core.targets import target_of

_PACKAGES: Final = ("hypothesis", "jsonschema", "packaging", "psutil")
"""Packages of the extra `author` that the checker needs."""

_PASSED: Final = 0
_FAILED: Final = 1
_INTERRUPTED: Final = 130

_TOKEN: Final = "ROPEWALK_TOKEN"
"""The environment variable with the token of a server at a URL."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `validate`."""
    from openenv_core.checker.subject import CheckLimits

    add = parser.add_argument
    add(
        "target",
        nargs="?",
        metavar="NAME|PATH|MODULE:ATTRIBUTE|URL|IMAGE",
        help="an environment by its name, its folder or file, its app, a running server, or an image",
    )
    select_checks = parser.add_argument_group("selection (all checks)")
    select_checks.add_argument(
        "--level",
        action="append",
        choices=list(map(str, CheckLevel)),
        default=[],
        help="checks of this level; repeatable",
    )
    select_checks.add_argument(
        "--check", action="append", metavar="NAME", default=[], help="the check of this name; repeatable"
    )
    select_checks.add_argument("--list", action="store_true", help="list the checks, and run none")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="one JSON document on standard output, nothing else"
    )
    add_fields(parser.add_argument_group("limits"), CheckLimits)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks.

    Returns:
        0 if no check failed, 1 if one did, 130 after Ctrl-C.

    Raises:
        OpenEnvError: Invalid arguments, or an unavailable target: status 2.
    """
    from openenv_core.checker.results import CheckReport, Console, as_json, format_list
    from openenv_core.checker.runner import run_isolated
    from openenv_core.checker.subject import CheckLimits, Subject

    checks = select_checks([CheckLevel(level) for level in arguments.level], arguments.check)
    if arguments.list:
        print("\n".join(format_list(checks)))
        return _PASSED
    if arguments.target is None:
        raise ConfigurationError("no target is given; `ropewalk validate .` is this folder")
    _require_packages()
    console = Console(io.StringIO() if arguments.json else sys.stdout, len(checks))
    target, limits = target_of(arguments.target), read_fields(CheckLimits, arguments)
    token = os.environ.get(_TOKEN) or None
    Subject(target, limits, token=token).require()
    try:
        run_isolated(target, limits, checks, token=token, on_start=console.begin, on_result=console.end)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    report = CheckReport(target.text, tuple(console.results), interrupted)
    console.finish(report)
    if arguments.json:
        print(as_json(report))
    if report.interrupted:
        return _INTERRUPTED
    return _PASSED if report.ok else _FAILED


def _require_packages() -> None:
    """Check once that the packages of the checks are installed; otherwise every check would report it."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the checks need packages that are not installed: {', '.join(missing)}; "
            "pip install 'ropewalk[author]'"
        )


COMMAND = Command(
    name="validate",
    help="check an environment: manifest, behaviour, determinism, isolation, leaks",
    configure=configure,
    run=run,
    examples=(
        "ropewalk validate .",
        "ropewalk validate blackjack --level static --level runtime",
        "ropewalk validate http://127.0.0.1:8000 --json",
        "ropewalk validate blackjack-env:latest",
    ),
)
