"""What a package offers to the command `ropewalk`."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
