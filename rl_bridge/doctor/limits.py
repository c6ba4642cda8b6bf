"""What a container, or a scheduler's cgroup, allows of a machine: less than /proc says. Linux, cgroups 1 and 2."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60
"""Version 1 says that there is none by a number about as large as there is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """What a process and all beside it in its cgroup may have.

    Attributes:
        memory: Bytes; None without a limit.
        memory_used: Of those, what cannot be given back by forgetting files.
        cores: How many they may keep busy; None without a limit.
    """

    memory: int | None = None
    memory_used: int = 0
    cores: float | None = None


def limits(*, cgroups: Path = CGROUPS, own: Path = OWN) -> Limits:
    """Those of this process: the tightest of its cgroup and of those around it.

    Args:
        cgroups: Where they are mounted.
        own: Says which one is ours.
    """
    found = Limits()
    for folder in _folders(cgroups, own, "memory"):
        allowed = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if allowed is not None and allowed < _NO_LIMIT and (found.memory is None or allowed < found.memory):
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
            found = Limits(memory=allowed, memory_used=max(0, used - _forgettable(folder)), cores=found.cores)
    for folder in _folders(cgroups, own, "cpu"):
        cores = _cores(folder)
        if cores is not None and (found.cores is None or cores < found.cores):
            found = Limits(memory=found.memory, memory_used=found.memory_used, cores=cores)
    return found


def _folders(cgroups: Path, own: Path, controller: str) -> Iterator[Path]:
    """Of ours and of all around it. Within a container the path may be one of the machine's: then the root is ours."""
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        folder = root / path.lstrip("/")
        for one in (folder, *folder.parents):
            if one.is_relative_to(root):
                yield one


def _cores(folder: Path) -> float | None:
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (
            _text(folder / "cpu.cfs_quota_us").strip(),
            _text(folder / "cpu.cfs_period_us").strip(),
        )
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _forgettable(folder: Path) -> int:
    """Bytes of files that are only kept because there is room."""
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
