"""Who owns a container: a process, named so that a later one of the same number is not taken for it.

The standard library only: the companion imports this file as its neighbour.
"""

import os
import subprocess
import uuid
from contextlib import suppress
from typing import NamedTuple

LABEL = "ropewalk.owner"
"""The label of every container that is ours: `<boot>-<process namespace>-<pid>-<start time>` of its owner."""

RUN = "ropewalk.run"
"""Tells a program's containers from those of the program that was the same process before it."""

UNKNOWN = "0"


class OwnerProcess(NamedTuple):
    """A process. Its number alone says little: another boot or namespace has the same numbers."""

    boot: str
    namespace: str
    pid: int
    start: str

    def __str__(self) -> str:
        return f"{self.boot}-{self.namespace}-{self.pid}-{self.start}"


def owner(pid: int | None = None) -> OwnerProcess:
    """Return a process of this machine as an owner, by default this one."""
    pid = os.getpid() if pid is None else pid
    return OwnerProcess(_boot(), _namespace(), pid, _start(pid) or UNKNOWN)


def parse(text: str) -> OwnerProcess | None:
    """Return the owner that a label names, None for a label that is not ours."""
    parts = text.rsplit("-", 3)
    if len(parts) != 4 or not parts[2].isdigit():
        return None
    return OwnerProcess(parts[0], parts[1], int(parts[2]), parts[3])


def is_gone(other: OwnerProcess) -> bool | None:
    """Whether the process has ended; None where that cannot be told from here."""
    if other.boot != _boot() or other.namespace != _namespace():
        return None
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except OverflowError:
        return None
    except PermissionError:
        pass  # another user's: it is there
    start = _start(other.pid)
    return start == "" if start is None or start == "" else UNKNOWN != other.start != start


def _start(pid: int) -> str | None:
    """Return when a process started; "" for one that has ended but was not waited for, None if unknown."""
    with suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything.
            fields = file.read().rpartition(b")")[2].split()
        return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
    if os.path.exists("/proc/self/stat"):
        return None
    with suppress(OSError, subprocess.SubprocessError):
        ps = ["ps", "-o", "lstart=", "-p", str(pid)]
        text = subprocess.run(ps, capture_output=True, text=True, timeout=5, check=True).stdout
        return "".join(each for each in text if each.isalnum()) or None
    return None


def _boot() -> str:
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return f"{uuid.getnode():012x}"


def _namespace() -> str:
    with suppress(OSError):
        return "".join(each for each in os.readlink("/proc/self/ns/pid") if each.isdigit())
    return UNKNOWN
