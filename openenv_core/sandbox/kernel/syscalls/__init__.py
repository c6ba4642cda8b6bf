"""System-call numbers per architecture, and which architecture this process runs on."""

import errno
import os
import struct
from functools import lru_cache

from .aarch64 import AARCH64
from .table import SyscallTable
from .x86_64 import X86_64

__all__ = ["AARCH64", "ARCHITECTURES", "X86_64", "SyscallTable", "current"]

ARCHITECTURES = {
    "x86_64": X86_64,
    "amd64": X86_64,
    "aarch64": AARCH64,
    "arm64": AARCH64,
}


@lru_cache(maxsize=1)
def current() -> SyscallTable:
    """The architecture of this process.

    Raises:
        OSError: ENOSYS where this is not Linux on an architecture with a table here.
    """
    # os.uname, not platform: that imports a good deal, and asks the same.
    uname = getattr(os, "uname", None)
    found = uname() if uname is not None else None
    if found is None or found.sysname != "Linux":
        raise OSError(errno.ENOSYS, "expected Linux, which the sandbox's kernel room is written for")
    architecture = ARCHITECTURES.get(found.machine)
    # A 32-bit program on a 64-bit kernel reports the kernel's machine, and has other numbers.
    if architecture is None or struct.calcsize("P") != 8:
        known = ", ".join(sorted(ARCHITECTURES))
        raise OSError(errno.ENOSYS, f"expected a 64-bit process on one of {known}, got {found.machine}")
    return architecture
