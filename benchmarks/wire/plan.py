"""The settings of a run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

SECTIONS: Final = ("step", "metrics", "clients", "imports", "concurrency")

ONE_CORE: Final = "one core"
BOTH_CORES: Final = "free"
"""Where a server may run: pinned to a core that the driver does not use, or unpinned, as most servers run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The settings of a run.

    Attributes:
        sections: Which of SECTIONS are measured.
        placements: Where the servers of the step section run.
        rounds: Measurements of each value; each round goes through all contestants.
        seconds: Duration of one measurement of steps.
        warm_up_s: Duration of its warm-up.
        sessions: The loads of the step section.
        turns: Turns of each server in a round of the step section; servers alternate, so that other load of the
            machine affects all alike.
        slices: Turns of each server in a round of the metrics section.
        sockets: The loads of the clients section.
        idle: Idle sessions whose memory is measured.
        concurrency: Numbers of sessions whose step waits for a second.
        concurrency_released: The same for the released server, which has a thread for each.
        concurrency_rounds: Rounds of that section.
        waits: Steps that each of those sessions takes.
        spread_s: Seconds over which their first steps are spread.
        released: The interpreter of the installation that has the released package; None if there is none.
        echoes: Whether the floor and the echo below ASGI can run.
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
