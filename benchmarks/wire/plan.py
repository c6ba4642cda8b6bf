"""How much is measured: the settings of a run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

SECTIONS: Final = ("step", "metrics", "clients", "imports", "concurrency")

ONE_CORE: Final = "one core"
BOTH_CORES: Final = "free"
"""Where a server may run: on a core that the driver keeps off, or wherever the system puts it, as most are run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The settings of a run.

    Attributes:
        sections: Which of SECTIONS are measured.
        placements: Where the servers of the step section run.
        rounds: How often each figure is measured; each round goes through all contestants.
        seconds: How long one measurement of steps lasts.
        warm_up_s: How long the same goes on before, unmeasured.
        sessions: The loads of the step section.
        turns: Into how many turns of each server a round of the step section is cut, so that what else the machine does
            meets all alike.
        slices: The same of the metrics section.
        sockets: The loads of the clients section.
        idle: Idle sessions whose memory is measured.
        concurrency: Numbers of sessions whose step waits for a second.
        concurrency_released: The same on the released server, which has a thread for each.
        concurrency_rounds: Rounds of that section.
        waits: Steps that each of those sessions takes.
        spread_s: Over which time their first steps are spread.
        released: The interpreter of the installation that has the released package; None without.
        echoes: Whether the floor can run, and the echo below ASGI.
    """

    sections: tuple[str, ...] = SECTIONS
    placements: tuple[str, ...] = (ONE_CORE, BOTH_CORES)
    rounds: int = 5
    seconds: float = 1.5
    warm_up_s: float = 0.3
    sessions: tuple[int, ...] = (1, 64, 256)
    turns: int = 15
    slices: int = 40
    sockets: tuple[int, ...] = (1, 16, 64)
    idle: int = 1024
    concurrency: tuple[int, ...] = (8192, 16384)
    concurrency_released: tuple[int, ...] = (256, 1024)
    concurrency_rounds: int = 3
    waits: int = 4
    spread_s: float = 1.0
    released: Path | None = None
    echoes: bool = True

    def with_rounds(self, rounds: int) -> "Plan":
        """Return the same with another number of rounds, everywhere."""
        return replace(self, rounds=rounds, concurrency_rounds=rounds)

    def quick(self) -> "Plan":
        """Return the plan with tiny numbers, which only shows that it runs."""
        return replace(
            self,
            placements=(ONE_CORE,),
            rounds=1,
            seconds=0.1,
            warm_up_s=0.05,
            sessions=(8,),
            turns=2,
            slices=2,
            sockets=(4,),
            idle=32,
            concurrency=(64,),
            concurrency_released=(16,),
            concurrency_rounds=1,
            waits=1,
            spread_s=0.1,
        )
