"""What happens while an image is built or pushed, told to whoever shows it."""

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a Dockerfile begins."""

    number: int
    total: int
    text: str


@dataclass(frozen=True, slots=True)
class Cached:
    """The step needs no work: its result is there."""


@dataclass(frozen=True, slots=True)
class Output:
    """A line that a step printed."""

    line: str


@dataclass(frozen=True, slots=True)
class Layer:
    """How far one layer is, of an image that is pulled or pushed.

    Attributes:
        name: The layer's short identity.
        status: In the engine's words.
        done: Bytes that have gone; 0 where unknown.
        total: Bytes of all; 0 where unknown.
    """

    name: str
    status: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a person should know."""

    text: str


def printed(text: str) -> list[str]:
    """Return the lines that a step printed, without a terminal's colours and moves."""
    plain = _ESCAPES.sub("", text)
    # Of a line that was written over, what stood there last.
    return [line.rstrip().rpartition("\r")[2] for line in plain.split("\n") if line.strip()]


_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Event = Step | Cached | Output | Layer | Note
Tell = Callable[[Event], None]
"""Takes one event. What it raises ends the build or push."""
