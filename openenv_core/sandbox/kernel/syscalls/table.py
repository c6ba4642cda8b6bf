"""How a table of system calls is written down, and the part that architectures share."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Since 424 a new call has the same number on every architecture. Up to Linux 6.17.
SHARED = """
@424 pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen
fsconfig fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise
epoll_pwait2 mount_setattr quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self
memfd_secret process_mrelease futex_waitv set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack
futex_wake futex_wait futex_requeue statmount listmount lsm_get_self_attr lsm_set_self_attr
lsm_list_modules mseal setxattrat getxattrat listxattrat removexattrat open_tree_attr file_getattr
file_setattr
"""


def numbered(text: str) -> dict[str, int]:
    """Read a table: names in the order of their numbers, where `@n` sets the number of the next name."""
    table: dict[str, int] = {}
    number = 0
    for word in text.split():
        if word.startswith("@"):
            number = int(word[1:])
            continue
        table[word] = number
        number += 1
    return table


@dataclass(frozen=True)
class SyscallTable:
    """One architecture's system calls.

    Attributes:
        name: As `uname -m` says it.
        audit: The AUDIT_ARCH value that seccomp shows a filter.
        numbers: Each call's number, by name.
        foreign_from: Numbers from here on belong to another calling convention (x32), None where there is none.
    """

    name: str
    audit: int
    numbers: Mapping[str, int] = field(repr=False, hash=False, compare=False)
    foreign_from: int | None = None

    @property
    def last(self) -> int:
        """The highest number in the table: a call beyond it is younger than this file."""
        return max(self.numbers.values())
