"""What a package offers to the command `ropewalk`."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One subcommand, named by an entry point of the group `ropewalk.commands`.

    Make one at the top of a module that imports nothing heavy, and import in `run`: the module is loaded
    for every `ropewalk --help`.

    Attributes:
        name: What it is called.
        help: One line for the list of commands.
        configure: Adds its arguments.
        run: Does the work and returns the exit status. May raise OpenEnvError, which becomes one line on
            standard error and status 2.
        examples: Shown at the end of its help, one a line.
        reword: Turns the words behind its name into those that its parser knows; None where those are all there are.
    """

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: tuple[str, ...] = ()
    reword: Callable[[Sequence[str]], Sequence[str]] | None = None


# Types of arguments. What they refuse is told with the option's name, and is status 2.


def read_count(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def read_seconds(text: str) -> float:
    """Read a number of seconds; 0 is one too."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")
    return seconds


def read_object(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value
