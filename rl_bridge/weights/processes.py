"""Which process published, and whether it still lives."""

import functools
import os
from pathlib import Path

from rl_bridge.weights.snapshot import Origin


def own_origin(rank: int) -> Origin:
    """This process, as rank `rank` of those that publish."""
    started = _started(os.getpid())
    assert started is not None
    return Origin(machine=own_machine(), pid=os.getpid(), started=started, rank=rank)


@functools.cache
def own_machine() -> str:
    """Names the machine and the container within it, as far as numbers of processes go."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def has_died(origin: Origin) -> bool:
    """Whether a publisher is gone for certain; of other machines nobody can tell from here."""
    return origin.machine == own_machine() and _started(origin.pid) != origin.started


def _started(pid: int) -> int | None:
    """When a process was started, in ticks; None where there is none, or only what is left of it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold blanks
    return None if fields[0] in "ZX" else int(fields[19])
