"""How a command ends, and text that came from elsewhere, for a terminal: nothing in it is obeyed there."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rl_bridge.errors import BridgeError, ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from rich.table import Table

FAILED = 1
MISUSED = 2


def exit_status(command: str, work: Callable[[], int]) -> int:
    """Do a command's work and say what went wrong; returns 1 where it failed, 2 where it was asked for wrongly."""
    try:
        try:
            return work()
        except ModuleNotFoundError as error:
            raise MissingDependencyError(str(error.name)) from error
    except BridgeError as error:
        print(f"ropewalk {command}: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, ConfigError) else FAILED


def printable(text: str) -> str:
    """The same with a question mark for all that a terminal would act on."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def plain(text: str) -> str:
    """The same as markup of rich's that means just this text."""
    from rich.markup import escape

    return escape(printable(text))


def table(title: str | None, headings: Iterable[str], rows: Iterable[Sequence[object]]) -> "Table":
    """A table of plain text; the column below a heading that begins with ">" is to the right."""
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for heading in headings:
        made.add_column(
            heading.lstrip(">"), justify="right" if heading[0] == ">" else "left", overflow="fold"
        )
    for row in rows:
        made.add_row(*(plain(str(cell)) for cell in row))
    return made
