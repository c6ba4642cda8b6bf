"""The command `ropewalk`, assembled from the subcommands of installed packages."""

import argparse
import difflib
import errno
import io
import os
import select
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Final, NoReturn

import openenv_core
from openenv_core import compat
from openenv_core.cli.command import Command, sanitize
from openenv_core.errors import ConfigurationError, OpenEnvError
from openenv_core.packages import prefer_ours

GROUP: Final = "ropewalk.commands"

FAILED: Final = 2
INTERRUPTED: Final = 130
OUTPUT_CLOSED: Final = 141
"""A shell's exit status for a program that SIGPIPE ended."""

_EXTRAS: Final[Mapping[str, str]] = {"servers": "server", "rl_bridge": "rl"}
"""The extras with the dependencies of our packages."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    return _run_to_status(lambda: _main(argv))


def run(command: Command, argv: Sequence[str]) -> int:
    """Run one subcommand with its arguments and return the exit status."""
    return _run_to_status(lambda: _run(command, argv))


def _run_to_status(command: Callable[[], int]) -> int:
    prefer_ours()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it stays open
    for stream in (sys.stdin, sys.stdout):
        # As standard error does, they escape what the encoding does not have: an environment's text may be any.
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="backslashreplace")
    try:
        status = command()
        sys.stdout.flush()
    except OpenEnvError as error:
        print(f"ropewalk: {sanitize(str(error))}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        _discard_output()
        return OUTPUT_CLOSED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"ropewalk: a disk is full: {error}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output()
        return FAILED
    return status


def _is_output_closed() -> bool:
    """Whether the reader of standard output, such as `head`, has closed it."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file
        return False
    poller = select.poll()
    poller.register(output, 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))


def _discard_output() -> None:
    """Redirect standard output to /dev/null; otherwise Python's flush at exit would fail."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _main(argv: Sequence[str]) -> int:
    if argv and (own := _find_own(argv[0])) is not None:
        return _run(load(own), argv[1:])
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    # Only the requested command is loaded: others may be slow or broken.
    entry_point = next((point for point in points if argv and point.name == argv[0]), None)
    return _overview(points, argv) if entry_point is None else _run(load(entry_point), argv[1:])


def _find_own(name: str) -> EntryPoint | None:
    """Return the entry point of one of our commands, without reading the metadata of every installed package."""
    try:
        points = distribution("ropewalk").entry_points
    except PackageNotFoundError:
        return None
    return next(iter(points.select(group=GROUP, name=name)), None)


def load(point: EntryPoint) -> Command:
    """Load a subcommand. Raises `ConfigurationError` if it cannot be loaded, with what to install."""
    try:
        command = point.load()
    except Exception as error:
        compat.check()  # installing the released package after ours breaks it
        package = point.value.partition(":")[0].partition(".")[0]
        extra = _EXTRAS.get(package)
        missing = isinstance(error, ImportError)
        remedy = (
            f"pip install 'ropewalk[{extra}]'" if missing and extra else f"see what is wrong with {package}"
        )
        raise ConfigurationError(
            f"expected to load the command {point.name!r} from {point.value}, "
            f"got {type(error).__name__}: {error}; {remedy}"
        ) from error
    if not isinstance(command, Command):
        raise ConfigurationError(
            f"expected {point.value} to be an openenv_core.cli.Command, got {type(command).__name__}"
        )
    return command


def _run(command: Command, argv: Sequence[str]) -> int:
    parser = _Parser(
        prog=f"ropewalk {command.name}",
        description=_fill(command.help),
        epilog=_examples(command.examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.configure(parser)
    known = argv if command.reword is None else command.reword(argv)
    return command.run(parser.parse_intermixed_args(known))  # options may come between positional arguments


def _overview(points: Sequence[EntryPoint], argv: Sequence[str]) -> int:
    """Handle the command's own options: help, version, an unknown subcommand."""
    parser = _Parser(
        prog="ropewalk",
        description=_fill(
            "Environment servers for reinforcement learning, their clients, and training on them."
        ),
        epilog="commands:\n" + "\n".join(_command_lines(points)) + "\n\nropewalk COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ropewalk {openenv_core.__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of the commands below")
    command_name = parser.parse_known_args(argv)[0].command
    if command_name is None:
        parser.print_help()
        return 0
    names = [point.name for point in points]
    near = difflib.get_close_matches(command_name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"
    raise ConfigurationError(f"expected a command, got {command_name!r}; {hint}")


def _command_lines(points: Iterable[EntryPoint]) -> Iterable[str]:
    for point in points:
        try:
            text = load(point).help
        except ConfigurationError as error:
            text = f"(not available: {error.__cause__ or error})"
        yield _fill(f"  {point.name:<12}{text}", indent=14)


def _fill(text: str, *, indent: int = 0) -> str:
    """Wrap a text at the terminal's width, as argparse does with the help of arguments."""
    width = max(shutil.get_terminal_size().columns - 2, indent + 20)
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def _examples(examples: Sequence[str]) -> str | None:
    return "examples:\n" + "\n".join(f"  {line}" for line in examples) if examples else None


class _Parser(argparse.ArgumentParser):
    """Raises `ConfigurationError` for invalid arguments, instead of exiting."""

    def error(self, message: str) -> NoReturn:
        cause = getattr(sys.exception(), "__context__", None)
        if isinstance(cause, ConfigurationError):  # argparse would replace the message of an argument's type
            raise cause from None
        raise ConfigurationError(f"{message}; see {self.prog} --help")
