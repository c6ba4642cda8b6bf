"""Where a process runs."""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Place:
    """Where one rank of a replica runs."""

    host: str
    pid: int
