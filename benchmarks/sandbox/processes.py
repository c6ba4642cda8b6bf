"""CPU time and memory of processes, exited descendants included."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.wire.processes import memory_kb, tree

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_CUTIME: Final = 13
"""Index of the CPU time of reaped children in /proc/PID/stat, counted after the name."""


def cpu_s(roots: list[int]) -> float:
    """Return the CPU time of processes and their descendants, reaped ones included."""
    return sum(_clock(pid) + _buried(pid) for root in roots for pid in tree(root))


def memory_mb(roots: list[int]) -> float:
    """Return the proportional memory of processes and their descendants."""
    return sum(memory_kb(pid) for root in roots for pid in tree(root)) / 1024


def descriptors(pid: int) -> int:
    """Return the number of open files of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _clock(pid: int) -> float:
    # Linux derives the number of a process's CPU clock from its id.
    with suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def _buried(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[_CUTIME]) + int(fields[_CUTIME + 1])) / _TICKS
    return 0.0
