"""How much is measured: the settings of a run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

SECTIONS: Final = ("step", "clients", "imports", "concurrency")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The settings of a run.

    Attributes:
        sections: Which of SECTIONS are measured.
        rounds: How often each figure is measured; each round goes through all contestants.
        seconds: How long one measurement of steps lasts.
        sessions: The loads of the step section.
        sockets: The loads of the clients section.
        idle: Idle sessions whose memory is measured, and of how many on the released server.
        concurrency: Numbers of sessions whose step waits for a second; and on the released server.
        waits: Steps that each of those takes.
        released: The interpreter of the installation that has the released package; None without.
        floor: Whether the floor can run.
        below_asgi: Whether the stack below ASGI is measured for orientation.
    """

    sections: tuple[str, ...] = SECTIONS
    rounds: int = 5
    seconds: float = 1.5
    sessions: tuple[int, ...] = (1, 64, 256)
    sockets: tuple[int, ...] = (1, 16, 64)
    idle: int = 1024
    concurrency: tuple[int, ...] = (8192, 16384)
    concurrency_released: tuple[int, ...] = (256, 1024)
    concurrency_rounds: int = 3
    waits: int = 4
    released: Path | None = None
    floor: bool = True
    below_asgi: bool = False

    def with_rounds(self, rounds: int) -> "Plan":
        """Return the same with another number of rounds, everywhere."""
        return replace(self, rounds=rounds, concurrency_rounds=rounds)

    def quick(self) -> "Plan":
        """Return the same with numbers that show whether it works, and nothing else."""
        return replace(
            self,
            rounds=1,
            seconds=0.2,
            sessions=(1, 8),
            sockets=(1, 4),
            idle=32,
            concurrency=(64,),
            concurrency_released=(16,),
            concurrency_rounds=1,
            waits=1,
        )
