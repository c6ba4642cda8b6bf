"""What a machine has: cores, memory, room for weights between processes, descriptors, GPUs."""

import importlib.util
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from rl_bridge.doctor.findings import Finding, Level
from rl_bridge.doctor.limits import Limits, limits

SHARED_MEMORY = Path("/dev/shm")
LITTLE_SHARED_MEMORY = 1 << 30
"""Containers have 64 MiB unless told otherwise, which is less than NCCL asks for between the GPUs of a host."""
FEW_DESCRIPTORS = 4096
"""An episode in flight has a socket."""


def machine() -> list[Finding]:
    """Look at everything."""
    allowed = limits()
    return [_cores(allowed), _memory(allowed), _shared_memory(), _descriptors(), *_gpus()]


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
    return Finding(what="GPUs", told=told, level=Level.BAD)


def _cores(allowed: Limits) -> Finding:
    usable, there = float(len(os.sched_getaffinity(0))), os.cpu_count() or 1
    told = f"{usable:g} usable of {there}"
    if allowed.cores is not None and allowed.cores < usable:
        told += f", of which a limit (cgroup) leaves {allowed.cores:g}"
        usable = allowed.cores
    return Finding(what="cores", told=told, figures={"cores": usable})


def _memory(allowed: Limits) -> Finding:
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
        return Finding(what=what, told=told, level=Level.BAD)
    told, figures = (
        f"{usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.1f} GB",
        {"free_gb": usage.free / 1e9},
    )
    if usage.free < LITTLE_SHARED_MEMORY:
        told += "; NCCL may run out of it between the GPUs of a host: docker run --shm-size, or an emptyDir of Memory"
        return Finding(what=what, told=told, level=Level.ODD, figures=figures)
    return Finding(what=what, told=told, figures=figures)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = float("inf") if soft == resource.RLIM_INFINITY else soft
    told = f"{soft} of at most {hard} a process" if soft != resource.RLIM_INFINITY else "without a limit"
    if allowed < FEW_DESCRIPTORS:
        told += f"; every session with an environment takes one: ulimit -n {FEW_DESCRIPTORS}"
        return Finding(what="descriptors", told=told, level=Level.ODD)
    return Finding(what="descriptors", told=told)
