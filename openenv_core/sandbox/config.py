"""What a sandbox and its sessions are allowed: levels, limits, and the sandbox's own settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox.errors import LimitsError


class Isolation(StrEnum):
    """One rung. Which one a sandbox stands on is what its start-up self-test proved, not what was asked for.

    Attributes:
        NAMESPACES: A root of read-only mounts, process, network, mount, IPC and host name spaces of its own, and
            all of `LSM`.
        LSM: Landlock, a system-call filter, and limits. The normal case inside a container.
        SECCOMP: The filter and limits: files of the machine that the user may read are readable.
        PROCESS: Limits alone. Not a boundary.
    """

    NAMESPACES = "namespaces"
    LSM = "lsm"
    SECCOMP = "seccomp"
    PROCESS = "process"

    def at_least(self, other: "Isolation") -> bool:
        """Return whether this rung holds back all that another does."""
        return LADDER.index(self) <= LADDER.index(other)


LADDER: Final = (Isolation.NAMESPACES, Isolation.LSM, Isolation.SECCOMP, Isolation.PROCESS)
"""From the strongest to the weakest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """How interpreters are made.

    Attributes:
        preload: Modules that are imported once, before interpreters are forked. Importing them again costs nothing
            there, and their memory is shared.
        strongest: Where the search for a rung of the ladder begins.
        minimum: Where it ends: without a rung that holds at or above this one, the sandbox does not start.
        readable: Files and folders that code may read, beside Python and what is installed with it.
        hidden: Files and folders in there that code may not read. The packages of this project always are.
        links: Names below the root, as "app", that lead to a folder of that name in the workspace. They need the level
            `namespaces`.
        boot_timeout_s: Seconds for the zygote and its imports.
        start_timeout_s: Seconds for one interpreter.
    """

    preload: tuple[str, ...] = ()
    strongest: Isolation = Isolation.NAMESPACES
    minimum: Isolation = Isolation.LSM
    readable: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    links: tuple[str, ...] = ()
    boot_timeout_s: float = 120.0
    start_timeout_s: float = 20.0

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
                f"expected the minimum namespaces with links, got {self.minimum}: only there is the root its own"
            )


_KIB: Final = 1 << 10
_MIB: Final = 1 << 20


def _limit(default: Any, *, least: float) -> Any:
    """Return a limit that leaves an interpreter able to run as long as it is at least so much."""
    return field(default=default, metadata={"least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one session. Sizes are bytes, times are seconds.

    Attributes:
        timeout_s: Of one execution, unless the call names a shorter one.
        grace_s: Between the interrupt of an execution that takes too long, which keeps the state, and its end.
        memory_bytes: Address space beyond what the interpreter has at the start, shared mappings included.
        output_bytes: What is kept of stdout, and of stderr, of one execution; more is counted and dropped.
        output_hard_bytes: What one execution may write to both together before it is stopped.
        outputs_bytes: The result and all displayed bundles of one execution together.
        file_bytes: One file of the workspace.
        disk_bytes: All files of the workspace.
        files: Files and folders of the workspace.
        open_files: Descriptors at once.
        processes: Processes and threads at once.
        allow_subprocess: Lets code start processes. Then the limits of memory hold for each of them, and for all
            together only where there is a memory control group.
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
            LimitsError: A name that is no limit, or a value that makes no sense.
        """
        known = {each.name for each in fields(self)}
        if unknown := sorted(set(values) - known):
            raise LimitsError(
                f"expected names of limits ({', '.join(sorted(known))}), got {', '.join(unknown)}; leave it out"
            )
        return replace(self, **values)

    def within(self, ceilings: "Limits") -> "Limits":
        """Return these limits where none exceeds its ceiling.

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
