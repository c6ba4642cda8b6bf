"""What the zygote and its forks are told."""

from dataclasses import dataclass
from typing import Any, Final

FOR_THE_LOADER: Final = ("LD_LIBRARY_PATH",)
"""Variables without which this very Python may not start. Once it has, the zygote forgets them: code has no business
with where the machine keeps its libraries."""


@dataclass(frozen=True)
class Told:
    """The zygote, once.

    Attributes:
        isolation: The rung of the ladder, by its name.
        preload: Modules to import.
        shown: Files and folders that code may read.
        hidden: What it may not, below those.
        readable: The same as files and folders none of which holds a hidden one.
        scratch: A folder for what imports want to write; None where the zygote has a file system of its own.
        privileged: Name spaces are made with the machine's own privileges, not with those of a user name space.
    """

    isolation: str
    preload: list[str]
    shown: list[str]
    hidden: list[str]
    readable: list[str]
    scratch: str | None
    privileged: bool


@dataclass(frozen=True)
class Spec:
    """One interpreter.

    Attributes:
        limits: By the names of `sandbox.limits.Limits`.
        uid: The user that it becomes; None leaves it as it is.
        workdir: Its folder; None: a file system of its own.
        snapshot: Each execution runs in a fork of the state before it.
    """

    limits: dict[str, Any]
    uid: int | None
    workdir: str | None
    snapshot: bool
