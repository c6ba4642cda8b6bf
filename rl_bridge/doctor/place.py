"""Which process of a meeting one is: plain values that travel to it."""

from dataclasses import dataclass
from typing import Final

SAID: Final = "ropewalk doctor: "
"""Begins a line in which a process says why it goes; what libraries say looks different."""
LARGE_TIMES: Final = 5
"""How often what takes long is timed, beside once that does not count."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RankPlace:
    """One process among those that meet.

    Attributes:
        address: HOST:PORT of the first host, where all find each other.
        rank: From 0; hosts count one after the other.
        world: Processes on all hosts together.
        per_host: Processes on each.
        gpu: The device that it computes on; None is the CPU.
        megabytes: Size of what is sent, in MiB.
        timeout_s: How long it waits for the others, when they meet and in each collective.
        owner: The process that started it, with which it ends.
    """

    address: str
    rank: int
    world: int
    per_host: int
    gpu: int | None
    megabytes: int
    timeout_s: float
    owner: int
