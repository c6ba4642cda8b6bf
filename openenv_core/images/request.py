"""What is asked of a builder, whichever it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
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
