"""A control group for each session, if this process may make any: limits all of its memory, and its processes.

It adds to the limits of each process, and is never required: `find` returns None where no group can be made, as in most
containers.
"""

import os
import re
import secrets
import signal
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from .libc import write_file

_PREFIX = "ropewalk-"
_NEEDED = ("memory", "pids")
_KILL_ROUNDS = 20


@dataclass(frozen=True)
class Cgroup:
    """One session's group: a directory (version 2), or one for each controller (version 1).

    Attributes:
        directories: Its directories by controller; all the same in version 2.
        version: The version of control groups, 1 or 2.
    """

    directories: dict[str, Path]
    version: int = 2

    @property
    def _each(self) -> list[Path]:
        return list(dict.fromkeys(self.directories.values()))

    def open_join_files(self) -> list[int]:
        """Return descriptors by which a process that cannot see the group can `join` it; the caller closes them.

        With version 1 they move only the joining thread, which avoids a wait for all other threads of the machine.
        """
        door = "tasks" if self.version == 1 else "cgroup.procs"
        doors: list[int] = []
        with ExitStack() as undo:
            for each in self._each:
                doors.append(os.open(each / door, os.O_WRONLY | os.O_CLOEXEC))
                undo.callback(os.close, doors[-1])
            undo.pop_all()
        return doors

    def count_oom_kills(self) -> int:
        """Return how many processes the kernel has killed because the group was out of memory."""
        directory = self.directories["memory"]
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                match = re.search(r"^oom_kill (\d+)$", (directory / name).read_text(), re.MULTILINE)
                return 0 if match is None else int(match[1])
        return 0

    def pids(self) -> set[int]:
        """Return the ids of the group's processes, in this process's pid namespace."""
        pids: set[int] = set()
        for directory in self._each:
            with suppress(OSError):
                pids.update(map(int, (directory / "cgroup.procs").read_text().split()))
        return pids - {0}  # 0: a process that is not in this namespace

    def kill(self) -> None:
        """Kill every process of the group, including any forked meanwhile."""
        with suppress(OSError):
            write_file(self.directories["memory"] / "cgroup.kill", "1")
            return
        for _round in range(_KILL_ROUNDS):
            pids = self.pids()
            if not pids:
                return
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the group; return False while it contains a process, even a zombie."""
        for directory in self._each:
            with suppress(OSError):
                directory.rmdir()
        return not any(directory.exists() for directory in self._each)


@dataclass(frozen=True)
class CgroupMaker:
    """Makes groups below directories that were found to allow it."""

    version: int
    parents: dict[str, Path]

    def make(self, name: str, memory_bytes: int, processes: int) -> Cgroup:
        """Make a group with limits. Its directory's name is unique, and contains the owner's process id."""
        full = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}-{name}"
        group = Cgroup(
            {controller: parent / full for controller, parent in self.parents.items()}, self.version
        )
        memory, pids = group.directories["memory"], group.directories["pids"]
        with ExitStack() as undo:
            for directory in group._each:
                directory.mkdir()
                undo.callback(directory.rmdir)
            if self.version == 2:
                write_file(memory / "memory.max", str(memory_bytes))
                with suppress(FileNotFoundError):  # no swap in this kernel
                    write_file(memory / "memory.swap.max", "0")
            else:
                write_file(memory / "memory.limit_in_bytes", str(memory_bytes))
                with suppress(OSError):  # without swap accounting there is no such limit
                    write_file(memory / "memory.memsw.limit_in_bytes", str(memory_bytes))
            write_file(pids / "pids.max", str(processes))
            undo.pop_all()
        return group

    def sweep(self) -> None:
        """Remove groups whose owners have ended."""
        for parent in dict.fromkeys(self.parents.values()):
            with suppress(OSError):
                for directory in list(parent.glob(f"{_PREFIX}*")):
                    owner = directory.name.removeprefix(_PREFIX).partition("-")[0]
                    if owner.isdecimal() and not _alive(int(owner)):
                        with suppress(OSError):
                            directory.rmdir()


def join(doors: list[int]) -> None:
    """Move the calling process, which must have one thread, into the group of these `open_join_files`; close them."""
    try:
        for door in doors:
            os.write(door, b"0")
    finally:
        for door in doors:
            os.close(door)


def find() -> CgroupMaker | None:
    """Return a maker of groups, tested by making one, or None; remove groups of owners that have ended.

    Call it before /proc and /sys become invisible.
    """
    with suppress(OSError, ValueError):
        mounted, own = _read_mounts(), _read_own_groups()
        for maker in (_version_2(mounted, own), _version_1(mounted, own)):
            with suppress(OSError):
                if maker is not None and maker.make("probe", 1 << 30, 16).remove():
                    maker.sweep()
                    return maker
    return None


def _version_2(mounted: dict[str, tuple[str, Path]], own: dict[str, str]) -> CgroupMaker | None:
    if "" not in mounted or "" not in own:
        return None
    top = mounted[""][1]
    own_group = _own_directory(mounted[""], own[""])
    # A group that contains processes cannot delegate controllers, but its parent may have done so to all children.
    for parent in (own_group, own_group.parent):
        if not parent.is_relative_to(top) or not os.access(parent / "cgroup.procs", os.W_OK):
            continue
        subtree_control = parent / "cgroup.subtree_control"
        with suppress(OSError):
            if parent == own_group and not set(_NEEDED) <= set(subtree_control.read_text().split()):
                write_file(subtree_control, " ".join(f"+{controller}" for controller in _NEEDED))
            if set(_NEEDED) <= set(subtree_control.read_text().split()):
                return CgroupMaker(2, dict.fromkeys(_NEEDED, parent))
    return None


def _version_1(mounted: dict[str, tuple[str, Path]], own: dict[str, str]) -> CgroupMaker | None:
    if not all(controller in mounted and controller in own for controller in _NEEDED):
        return None
    return CgroupMaker(
        1, {controller: _own_directory(mounted[controller], own[controller]) for controller in _NEEDED}
    )


def _own_directory(mounted: tuple[str, Path], own: str) -> Path:
    # The mount may show only a part of the hierarchy.
    root, directory = mounted
    inside = os.path.relpath(own, root)
    return directory if inside.startswith("..") else directory / inside


def _read_mounts() -> dict[str, tuple[str, Path]]:
    """Return the root within the hierarchy and the mount point, by controller; version 2 under the empty name."""
    mounts: dict[str, tuple[str, Path]] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _source, options) = before.split(), after.split()[:3]
        place = (fields[3], Path(fields[4]))
        if kind == "cgroup2":
            mounts.setdefault("", place)
        elif kind == "cgroup":
            for controller in options.split(","):
                mounts.setdefault(controller, place)
    return mounts


def _read_own_groups() -> dict[str, str]:
    """Return this process's group by controller; version 2 under the empty name."""
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
