"""The interface of subcommands of `ropewalk`, which packages provide."""

import argparse
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from openenv_core.errors import ConfigurationError, describe_faults

if TYPE_CHECKING:
    from pydantic import BaseModel

ModelT = TypeVar("ModelT", bound="BaseModel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A subcommand, registered by an entry point of the group `ropewalk.commands`.

    Define it in a module that imports nothing heavy, and import in `run`: every `ropewalk --help` loads the module.

    Attributes:
        name: Name of the subcommand.
        help: One line for the list of commands.
        configure: Adds its arguments to a parser.
        run: Runs it and returns the exit status. An OpenEnvError becomes one line on standard error and status 2.
        examples: Examples at the end of its help, one per line.
        reword: Converts its arguments before they are parsed; None leaves them unchanged.
    """

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: tuple[str, ...] = ()
    reword: Callable[[Sequence[str]], Sequence[str]] | None = None


# Types of arguments. argparse reports their errors with the option's name; the status is 2.


def read_count(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def read_seconds(text: str) -> float:
    """Parse a number of seconds, which may be 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")
    return seconds


def read_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


# Options that are the fields of a model, which reads and checks their texts.


def add_fields(
    group: Any,
    model: "type[BaseModel]",
    *,
    without: Container[str] = (),
    readers: Mapping[str, Callable[[str], Any]] | None = None,
) -> None:
    """Add an option for each field of a model, with its description and default.

    Args:
        group: The group of arguments.
        model: The model; the names of its fields end with `_s` if they are seconds.
        without: Fields that get no option.
        readers: Parsers of texts, by field, that the model cannot read itself.
    """
    for name, field in model.model_fields.items():
        if name not in without:
            default = "" if field.default in (None, {}, ()) else f" ({field.default})"
            group.add_argument(
                f"--{name.removesuffix('_s').replace('_', '-')}",
                dest=name,
                metavar="SECONDS" if name.endswith("_s") else None,
                type=(readers or {}).get(name, str),
                help=f"{field.description}{default}",
            )


def read_fields(model: "type[ModelT]", arguments: argparse.Namespace, **values: Any) -> "ModelT":
    """Return a model of some values and of the options that are given; ConfigurationError if one is invalid."""
    from pydantic import ValidationError

    given = {name: getattr(arguments, name, None) for name in model.model_fields.keys() - values.keys()}
    try:
        return model(**values, **{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ConfigurationError(f"invalid options: {describe_faults(error, 'options')}") from None


_CONTROL: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # moves, colours
    r"|\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links, the clipboard
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
"""Control sequences of terminals."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


def sanitize(text: str, *, colours: bool = False) -> str:
    """Return a text without control sequences; newlines and tabs stay."""

    def replacement(match: re.Match[str]) -> str:
        return match[0] if colours and _COLOUR.fullmatch(match[0]) else ""

    return _CONTROL.sub(replacement, text.replace("\r\n", "\n").replace("\r", "\n")) + (
        "\x1b[0m" if colours and "\x1b[" in text else ""
    )
