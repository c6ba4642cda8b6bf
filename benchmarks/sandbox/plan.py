"""The settings of a run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from openenv_core.sandbox.config import LADDER

SECTIONS: Final = ("start", "burst", "execute", "throughput", "memory", "loops", "abandon")

PRELOADS: Final = ("none", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The settings of a run.

    Attributes:
        sections: Which of SECTIONS are measured.
        levels: Isolation levels.
        preloads: Modules that interpreters have imported: names joined by "+", or "none".
        rounds: Measurements of each value; each round goes through all contestants.
        starts: Sessions started one after another.
        peer_starts: Starts of a Jupyter kernel, and of `docker run`.
        burst: Sessions started and used at once.
        executions: Executions one after another.
        peer_executions: Executions through a container engine.
        concurrent: Sessions that execute at once.
        seconds: Duration of the throughput section.
        live: Sessions alive at once, whose memory is measured.
        loop_s: Seconds of one pure-Python loop.
        abandoned: Sessions that are opened, used and abandoned.
        wave: How many of them at once.
        jupyter: The interpreter of an installation with a Jupyter kernel; None if there is none.
        image: The image of the engine's containers; None without an engine.
        jails: Whether bubblewrap and nsjail are measured too.
    """

    sections: tuple[str, ...] = SECTIONS
    levels: tuple[str, ...] = tuple(map(str, LADDER))
    preloads: tuple[str, ...] = PRELOADS
    rounds: int = 5
    starts: int = 40
    peer_starts: int = 2
    burst: int = 100
    executions: int = 500
    peer_executions: int = 5
    concurrent: int = 32
    seconds: float = 2.0
    live: int = 500
    loop_s: float = 0.25
    abandoned: int = 1000
    wave: int = 100
    jupyter: Path | None = None
    image: str | None = None
    jails: bool = False

    def quick(self) -> "Plan":
        """Return the plan with tiny numbers, which only shows that it runs."""
        return replace(
            self,
            preloads=("none",),
            rounds=1,
            starts=2,
            peer_starts=1,
            burst=4,
            executions=5,
            peer_executions=1,
            concurrent=2,
            seconds=0.2,
            live=4,
            loop_s=0.02,
            abandoned=6,
            wave=3,
        )
