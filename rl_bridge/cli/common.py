"""Helpers of the commands: configuration keys as arguments, exit statuses, untrusted text in a terminal."""

import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Final, TypeVar

from openenv_core.cli.command import sanitize
from openenv_core.errors import ConfigurationError
from rl_bridge.errors import BridgeError, ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from rich.table import Table

NumberT = TypeVar("NumberT", int, float)

RUNS: Final = "runs"
"""The folder searched for runs; the default of `output_dir`."""

TOP_LEVEL: Final = ("algorithm", "deterministic", "output_dir")
"""Keys without a dot that are not options of any command."""
_KEY: Final = re.compile(
    rf"--(?P<key>{'|'.join(TOP_LEVEL)}|[A-Za-z_]\w*(?:\.\w+)+)(?P<value>=.*)?", re.DOTALL
)


def add_overrides(parser: ArgumentParser) -> None:
    """Add an argument for overrides of configuration keys."""
    text = "override a key of the file; also as --section.key value"
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=text)


def number_type(option: str, kind: type[NumberT], *, least: float | None = None) -> Callable[[str], NumberT]:
    """Return an argparse type for a finite number above 0, or of at least `least`."""
    return partial(_parse_number, option, kind, least)


def _parse_number(option: str, kind: type[NumberT], least: float | None, text: str) -> NumberT:
    with suppress(ValueError):
        value = kind(text)
        if (value > 0 if least is None else value >= least) and value < float("inf"):
            return value
    bound = "above 0" if least is None else f"of at least {least:g}"
    raise ConfigurationError(f"expected {option} {bound}, got {text}")


def overrides_first_class(argv: Sequence[str]) -> list[str]:
    """Return the arguments with every `--a.b c` and `--a.b=c` as `a.b=c`, and the others unchanged.

    Options with a dot, which no command has, and those in `TOP_LEVEL` are keys. An argument that begins with two dashes
    is the next option, never a value. A key without a value stays without one; parsing the overrides refuses it.
    """
    normalised: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*normalised, argument, *rest]
        match = _KEY.fullmatch(argument)
        if match is None:
            normalised.append(argument)
        elif match["value"] is not None:
            normalised.append(match["key"] + match["value"])
        elif rest and not rest[0].startswith("--"):
            normalised.append(f"{match['key']}={rest.pop(0)}")
        else:
            normalised.append(match["key"])
    return normalised


FAILED = 1
USAGE_ERROR = 2


def exit_status(command: str, work: Callable[[], int]) -> int:
    """Run a command and print its error, if any; returns its status, 1 if it failed, 2 for a bad command line."""
    try:
        try:
            return work()
        except ImportError as error:
            raise MissingDependencyError.of_import(error) from error
    except BridgeError as error:
        print(f"ropewalk {command}: {sanitize(str(error))}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else FAILED


def with_exit_status(command: str) -> Callable[[Callable[[Namespace], int]], Callable[[Namespace], int]]:
    """Decorate a command's `run` so that it goes through `exit_status`."""

    def decorate(work: Callable[[Namespace], int]) -> Callable[[Namespace], int]:
        return wraps(work)(lambda arguments: exit_status(command, lambda: work(arguments)))

    return decorate


def replace_unprintable(text: str) -> str:
    """Return the text with "?" for every character that is not printable, such as terminal escapes."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def escape_markup(text: str) -> str:
    """Return rich markup that renders as exactly this text, unprintable characters replaced."""
    from rich.markup import escape

    return escape(replace_unprintable(text))


def make_table(title: str | None, headings: Iterable[str], rows: Iterable[Sequence[object]]) -> "Table":
    """Return a table of plain text; a heading that begins with ">" right-aligns its column."""
    from rich.table import Table

    rich_table = Table(title=title, title_justify="left")
    for heading in headings:
        rich_table.add_column(
            heading.lstrip(">"), justify="right" if heading[0] == ">" else "left", overflow="fold"
        )
    for row in rows:
        rich_table.add_row(*(escape_markup(str(cell)) for cell in row))
    return rich_table
