"""`ropewalk list`: list the available environments."""

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from openenv_core.cli import Command
from openenv_core.cli.command import sanitize

if TYPE_CHECKING:
    from servers.environments import ListedEnvironment

_COLUMNS: Final = ("NAME", "VERSION", "TARGET", "WHERE", "DESCRIPTION")
_MIN_DESCRIPTION: Final = 30
"""Characters of a description without which other columns are left out."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `list`."""
    parser.add_argument(
        "where",
        nargs="?",
        metavar="FOLDER",
        help="list the environments of this folder only; by default all that can be served from here: those of the "
        "working directory, and installed ones",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """List the environments; broken ones are listed with their error."""
    from servers.environments import environments, environments_below

    listed = environments() if arguments.where is None else environments_below(Path(arguments.where))
    if arguments.json:
        print(json.dumps([dataclasses.asdict(environment) for environment in listed], indent=2))
    elif listed:
        _print_table(listed)
    else:
        print("no environments here; ropewalk init NAME makes one", file=sys.stderr)
    return 0


def _print_table(listed: "Sequence[ListedEnvironment]") -> None:
    rows = [
        tuple(
            sanitize(str(cell)).replace("\n", " ")
            for cell in (
                environment.name,
                environment.version or "-",
                environment.target,
                _shorten_address(environment.where),
                environment.description,
            )
        )
        for environment in listed
    ]
    # A broken environment has another line, below, with its error.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    sizes = [max(len(row[at]) for row in (_COLUMNS, *rows)) for at in range(len(_COLUMNS) - 1)]
    shown = list(range(len(sizes)))
    for column in ("WHERE", "VERSION", "NAME"):  # in a narrow terminal: a folder is found by the target too
        if width is not None and sum(sizes[at] + 2 for at in shown) + _MIN_DESCRIPTION > width:
            shown.remove(_COLUMNS.index(column))
    for row, environment in zip((_COLUMNS, *rows), (None, *listed), strict=True):
        cells = "".join(f"{row[at].ljust(sizes[at])}  " for at in shown)
        print(_shorten(f"{cells}{row[-1]}".rstrip(), width))
        if environment is not None and environment.error is not None:
            print(f"  broken: {sanitize(environment.error)}")


def _shorten(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else f"{line[: max(0, width - 3)]}..."


def _shorten_address(where: str) -> str:
    """Return the shortest form of a folder: relative to the working directory, to home, or absolute."""
    path = Path(where)
    if path == Path.cwd():
        return "."
    for folder, sign in ((Path.cwd(), "."), (Path(os.path.expanduser("~")), "~")):
        if path.is_relative_to(folder):
            return f"{sign}/{path.relative_to(folder)}"
    return where


COMMAND = Command(
    name="list",
    help="list the available environments",
    configure=configure,
    run=run,
    examples=(
        "ropewalk list",
        "ropewalk list --json",
        "ropewalk list path/to/environments",
    ),
)
