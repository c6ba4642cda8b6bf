"""Resource limits of a process, relative to its usage when they are set."""

import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from . import libc

# glibc's mallopt parameter. Each further arena reserves 64 MiB of address space for a thread.
_M_ARENA_MAX = -8

_LOCKED_BYTES = 64 << 10
_PENDING_SIGNALS = 64


@dataclass(frozen=True)
class Footprint:
    """Memory that a process occupies, in bytes; its forks start with the same."""

    address_space: int
    data: int


def footprint(proc: int | None = None) -> Footprint:
    """Return this process's current footprint.

    Args:
        proc: A descriptor of a /proc that shows this process, if /proc itself is not available.
    """
    path = "/proc/self/statm" if proc is None else "self/statm"
    with libc.closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)) as descriptor:
        pages = [int(field) for field in os.read(descriptor, 256).split()]
    return Footprint(pages[0] * resource.getpagesize(), pages[5] * resource.getpagesize())


def count_tasks(uid: int) -> int:
    """Return the number of a user's processes and threads visible in /proc, which RLIMIT_NPROC counts.

    Takes a few microseconds per process of the machine, so do not call it for every session.

    Raises:
        OSError: /proc could not be read, for want of a descriptor for example. A partial count would be too low.
    """
    tasks = 0
    with os.scandir("/proc") as entries:
        for entry in entries:
            if not entry.name.isdecimal():
                continue
            try:
                if entry.stat().st_uid == uid:
                    # The fields after the process name, which may contain anything and ends at the last bracket.
                    fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                    tasks += int(fields[17])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            except PermissionError:
                tasks += 1  # /proc may hide its number of threads (hidepid=1)
    return tasks


def one_arena() -> None:
    """Make the C library's malloc use one arena for all threads, if it has arenas."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def apply_rlimits(
    *,
    memory_bytes: int,
    file_bytes: int,
    open_files: int,
    processes: int,
    existing_tasks: int = 0,
    base: Footprint | None = None,
) -> None:
    """Set this process's limits permanently, hard and soft ones alike.

    Args:
        memory_bytes: Memory that it may allocate beyond `base`.
        file_bytes: Maximum size of a file that it writes.
        open_files: Limit of descriptor numbers, which count from 0; open ones beyond it stay open.
        processes: Processes and threads that its user may have in this user namespace.
        existing_tasks: Processes and threads that the user already has elsewhere, if it is shared.
        base: Its current footprint; read from /proc by default.
    """
    base = base or footprint()
    for name, value in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_AS", base.address_space + memory_bytes),
        ("RLIMIT_DATA", base.data + memory_bytes),
        ("RLIMIT_FSIZE", file_bytes),
        ("RLIMIT_NOFILE", open_files),
        ("RLIMIT_NPROC", existing_tasks + processes),
        ("RLIMIT_MEMLOCK", _LOCKED_BYTES),
        ("RLIMIT_MSGQUEUE", 0),
        ("RLIMIT_SIGPENDING", _PENDING_SIGNALS),
        ("RLIMIT_RTPRIO", 0),
        ("RLIMIT_NICE", 0),
    ):
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        lowered = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (lowered, lowered))
