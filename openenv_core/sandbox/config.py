"""Configuration of a sandbox and its sessions: isolation levels, limits, settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox.errors import LimitsError


class Isolation(StrEnum):
    """An isolation level. A sandbox's level is the one that its start-up self-test proved, not the one requested.

    Attributes:
        NAMESPACES: A root of read-only mounts, separate process, network, mount, IPC and UTS namespaces, and all of
            `LSM`.
        LSM: Landlock, a system-call filter, and limits. The usual level inside a container.
        SECCOMP: The filter and limits. Code can read every file that its user can.
        PROCESS: Limits only. Not a security boundary.
    """

    NAMESPACES = "namespaces"
    LSM = "lsm"
    SECCOMP = "seccomp"
    PROCESS = "process"

    def at_least(self, other: "Isolation") -> bool:
        """Return whether this level is as strong as another, or stronger."""
        return LADDER.index(self) <= LADDER.index(other)


LADDER: Final = (Isolation.NAMESPACES, Isolation.LSM, Isolation.SECCOMP, Isolation.PROCESS)
"""From the strongest to the weakest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """A sandbox's settings.

    Attributes:
        preload: Modules imported once, before interpreters are forked. Importing them in an interpreter then costs
            nothing, and their memory is shared.
        strongest: The first isolation level to try.
        minimum: The last level to try. If none from `strongest` to this one works, the sandbox does not start.
        readable: Files and folders that code may read, besides Python and the packages installed with it.
        hidden: Files and folders among them that code may not read. This project's packages are always hidden.
        links: Paths below the root folder, such as "app" or "dev/shm", that link to the same path in the workspace.
            They require the level `namespaces`.
    """

    preload: tuple[str, ...] = ()
    strongest: Isolation = Isolation.NAMESPACES
    minimum: Isolation = Isolation.LSM
    readable: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    links: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.strongest.at_least(self.minimum):
            raise ConfigurationError(
                f"expected a strongest level at or above the minimum {self.minimum}, got {self.strongest}; "
                "from the strongest: namespaces, lsm, seccomp, process"
            )
        for name in self.preload:
            if not all(component.isidentifier() for component in name.split(".")):
                raise ConfigurationError(f"expected names of modules to preload, got {name!r}")
        if self.links and self.minimum is not Isolation.NAMESPACES:
            raise ConfigurationError(
                f"expected the minimum namespaces with links, got {self.minimum}: only that level has its own root"
            )


_KIB: Final = 1 << 10
_MIB: Final = 1 << 20


def _limit(default: Any, *, least: float) -> Any:
    """Return a field for a limit; below `least`, an interpreter could not run."""
    return field(default=default, metadata={"least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one session. Sizes are in bytes, times in seconds.

    Attributes:
        timeout_s: Timeout of one execution, unless the call sets a shorter one.
        grace_s: Time between the interrupt of an execution that exceeds its timeout, which keeps the state, and the
            kill.
        memory_bytes: Address space beyond what the interpreter has at the start, shared mappings included.
        output_bytes: Output kept of stdout, and of stderr, per execution; the rest is counted and dropped.
        output_hard_bytes: Output to both together after which an execution is stopped.
        outputs_bytes: The result and all displayed bundles of one execution together.
        file_bytes: Size of one file in the workspace.
        disk_bytes: Size of all files in the workspace.
        files: Number of files and folders in the workspace.
        open_files: Number of open descriptors.
        processes: Number of processes and threads.
        allow_subprocess: Whether code may start processes. The memory limit then holds for each of them, and for all
            of them together only where a memory control group can be made.
    """

    timeout_s: float = _limit(10.0, least=0.001)
    grace_s: float = _limit(0.3, least=0.0)
    memory_bytes: int = _limit(512 * _MIB, least=16 * _MIB)
    output_bytes: int = _limit(64 * _KIB, least=0)
    output_hard_bytes: int = _limit(8 * _MIB, least=1 * _KIB)
    outputs_bytes: int = _limit(4 * _MIB, least=1 * _KIB)
    file_bytes: int = _limit(64 * _MIB, least=4 * _KIB)
    disk_bytes: int = _limit(64 * _MIB, least=64 * _KIB)
    files: int = _limit(4096, least=8)
    open_files: int = _limit(64, least=16)
    processes: int = _limit(32, least=1)
    allow_subprocess: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), each.metadata.get("least")
            if least is None:
                if not isinstance(value, bool):
                    raise LimitsError(f"expected true or false for the limit {each.name}, got {value!r}")
                continue
            kinds = (int, float) if each.name.endswith("_s") else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
                kind = "seconds" if float in kinds else "a whole number"
                raise LimitsError(f"expected {kind} for the limit {each.name}, got {value!r}")
            if value < least:
                raise LimitsError(f"expected at least {least} for the limit {each.name}, got {value!r}")

    def changed(self, values: Mapping[str, Any]) -> "Limits":
        """Return these limits with some of them replaced.

        Raises:
            LimitsError: A name is not a limit, or a value is invalid.
        """
        known = {each.name for each in fields(self)}
        if unknown := sorted(set(values) - known):
            raise LimitsError(
                f"expected names of limits ({', '.join(sorted(known))}), got {', '.join(unknown)}; leave it out"
            )
        return replace(self, **values)

    def within(self, ceilings: "Limits") -> "Limits":
        """Return these limits unless one exceeds its ceiling.

        Raises:
            LimitsError: One does; the message names it.
        """
        for each in fields(self):
            value, ceiling = getattr(self, each.name), getattr(ceilings, each.name)
            if value > ceiling:
                raise LimitsError(
                    f"expected at most {ceiling} for the limit {each.name}, got {value}; "
                    "ask for less, or raise the server's ceiling"
                )
        return self
