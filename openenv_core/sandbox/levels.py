"""The ladder of isolation: what stands between a session's code and the machine."""

from enum import StrEnum
from typing import Final


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

    @property
    def strength(self) -> int:
        """Grows with what the rung holds back: 0 for `PROCESS`, 3 for `NAMESPACES`."""
        return len(LADDER) - 1 - LADDER.index(self)

    def at_least(self, other: "Isolation") -> bool:
        """Return whether this rung holds back all that another does."""
        return self.strength >= other.strength


LADDER: Final = (Isolation.NAMESPACES, Isolation.LSM, Isolation.SECCOMP, Isolation.PROCESS)
"""From the strongest to the weakest."""
