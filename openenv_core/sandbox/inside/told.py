"""What the zygote and its forks are told."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Told:
    """The zygote, once.

    Attributes:
        isolation: The rung of the ladder, by its name.
        preload: Modules to import.
        readable: Files and folders that code may read.
        scratch: Where sessions' folders are; None where each has a file system of its own.
    """

    isolation: str
    preload: list[str]
    readable: list[str]
    scratch: str | None


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
