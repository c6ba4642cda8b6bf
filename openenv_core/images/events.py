"""What is asked of a builder, and what happens while an image is built or pushed."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


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
class StepOutput:
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

Event = Step | Cached | StepOutput | Layer | Note
Tell = Callable[[Event], None]
"""Takes one event. What it raises ends the build or push."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest:
    """One image to build.

    Attributes:
        context: The folder that the Dockerfile's COPY sees.
        dockerfile: Relative to the context.
        tags: What the image is called; at least one.
        build_args: Values of its ARGs.
        labels: Put on the image.
        target: The stage to build; None: the last.
        no_cache: Do every step anew.
        pull: Ask the registry for newer images to stand on.
    """

    context: Path
    dockerfile: str
    tags: tuple[str, ...]
    build_args: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    no_cache: bool = False
    pull: bool = False
