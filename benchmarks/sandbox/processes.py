"""What processes have used, those that are gone included."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.wire.processes import memory_kb, tree

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_CUTIME: Final = 13
"""Where /proc/PID/stat has the time of children that were buried, counted from after the name."""


def cpu_s(roots: list[int]) -> float:
    """Return the CPU time of processes, of what they have started, and of what of it is gone and buried."""
    return sum(_clock(pid) + _buried(pid) for root in roots for pid in tree(root))


def memory_mb(roots: list[int]) -> float:
    """Return the proportional memory of processes and of all that they have started."""
    return sum(memory_kb(pid) for root in roots for pid in tree(root)) / 1024


def descriptors(pid: int) -> int:
    """Return how many files a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _clock(pid: int) -> float:
    # Linux numbers the clock of a process from its id.
    with suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def _buried(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[_CUTIME]) + int(fields[_CUTIME + 1])) / _TICKS
    return 0.0
