"""Resource limits of a process, relative to what it has when they are set."""

import ctypes
import errno
import os
import resource
from dataclasses import dataclass
from pathlib import Path

# glibc's mallopt parameter. Each further arena reserves 64 MiB of address space for a thread.
_M_ARENA_MAX = -8

_LOCKED_BYTES = 64 << 10
_PENDING_SIGNALS = 64


@dataclass(frozen=True)
class Footprint:
    """What a process occupies, in bytes: a fork of it starts from the same."""

    address_space: int
    data: int


def footprint(proc: int | None = None) -> Footprint:
    """Return what this process occupies now.

    Args:
        proc: A descriptor of a /proc that sees this process, where /proc itself is gone.
    """
    path = "/proc/self/statm" if proc is None else "self/statm"
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        pages = [int(field) for field in os.read(descriptor, 256).split()]
    finally:
        os.close(descriptor)
    return Footprint(pages[0] * resource.getpagesize(), pages[5] * resource.getpagesize())


def count_tasks(uid: int) -> int:
    """Return how many processes and threads of a uid this process's /proc shows: what RLIMIT_NPROC counts.

    Takes a few microseconds for each process of the machine: ask now and then, not for each session.

    Raises:
        OSError: /proc could not be read, for want of a descriptor for example. A count without what
            could not be looked at would be too low.
    """
    tasks = 0
    with os.scandir("/proc") as entries:
        for entry in entries:
            if not entry.name.isdecimal():
                continue
            try:
                if entry.stat().st_uid == uid:
                    # After the name, which may hold anything but ends with the last bracket.
                    fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
                    tasks += int(fields[17])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            except PermissionError:
                tasks += 1  # /proc may hide how many threads it has (hidepid=1)
    return tasks


def one_arena() -> None:
    """Have the C library's malloc serve all threads from one arena, where it is one that has arenas."""
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
    """Set the limits of this process for good: hard ones equal soft ones.

    Args:
        memory_bytes: What it may take beyond what it has.
        file_bytes: The size of any one file that it writes.
        open_files: Descriptors, counted from 0.
        processes: Processes and threads that its uid may have in this user namespace.
        existing_tasks: How many others of that uid there are already, where the uid is shared.
        base: What it has now; read from /proc by default.
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
        try:
            resource.setrlimit(which, (lowered, lowered))
        except (OSError, ValueError) as error:
            code = getattr(error, "errno", None) or errno.EINVAL
            raise OSError(code, f"{name} {lowered}: {error}") from None
